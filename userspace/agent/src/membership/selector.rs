//! Enablement selectors: Istio's `AMBIENT_ENABLEMENT_SELECTOR`.
//!
//! A YAML list of `{podSelector, namespaceSelector}`, each a label selector of Kubernetes. A misspelt key
//! is an error here: in Istio it makes the selector empty, and an empty selector matches everything.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use kube::core::{ParseExpressionError, Selector, SelectorExt as _};
use serde::Deserialize;

/// Labels of a pod or a namespace.
pub type Labels = BTreeMap<String, String>;

/// One way into the mesh: both selectors match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Enablement {
    pod: Selector,
    namespace: Selector,
}

impl Enablement {
    /// Whether a pod is selected.
    pub fn matches(&self, pod: &Labels, namespace: &Labels) -> bool {
        self.pod.matches(pod) && self.namespace.matches(namespace)
    }

    /// Whether the namespace alone says that its pods may be selected.
    pub fn names_namespace(&self, namespace: &Labels) -> bool {
        !self.namespace.selects_all() && self.namespace.matches(namespace)
    }
}

/// The chart's default (`cni.ambient.enablementSelectors`).
pub const DEFAULT: &str = "
- podSelector:
    matchLabels: {istio.io/dataplane-mode: ambient}
- podSelector:
    matchExpressions:
    - {key: istio.io/dataplane-mode, operator: NotIn, values: [none]}
  namespaceSelector:
    matchLabels: {istio.io/dataplane-mode: ambient}
";

/// The text is no list of selectors.
#[derive(Debug, thiserror::Error)]
#[error("the enablement selectors cannot be read: {0}")]
pub struct Unreadable(Box<serde_saphyr::Error>);

/// Reads the list.
pub fn parse(text: &str) -> Result<Vec<Enablement>, Unreadable> {
    let unreadable = |error| Unreadable(Box::new(error));
    let written: Vec<Written> = serde_saphyr::from_str(text).map_err(unreadable)?;
    let selectors: Result<Vec<_>, ParseExpressionError> = written
        .into_iter()
        .map(|Written { pod_selector, namespace_selector }| {
            Ok(Enablement { pod: pod_selector.selector()?, namespace: namespace_selector.selector()? })
        })
        .collect();
    selectors.map_err(|error| unreadable(serde::de::Error::custom(error)))
}

/// As it is written; the types of Kubernetes would ignore a key that they do not know.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Written {
    pod_selector: WrittenSelector,
    namespace_selector: WrittenSelector,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct WrittenSelector {
    match_labels: Labels,
    match_expressions: Vec<Expression>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Expression {
    key: String,
    operator: String,
    #[serde(default)]
    values: Vec<String>,
}

impl WrittenSelector {
    fn selector(self) -> Result<Selector, ParseExpressionError> {
        let expressions = self.match_expressions.into_iter().map(Expression::requirement);
        let selector = LabelSelector {
            match_labels: Some(self.match_labels),
            match_expressions: Some(expressions.collect::<Result<_, _>>()?),
        };
        selector.try_into()
    }
}

impl Expression {
    /// The rule of the API server: `In` and `NotIn` need values, the others take none.
    fn requirement(self) -> Result<LabelSelectorRequirement, ParseExpressionError> {
        let Self { key, operator, values } = self;
        let needs_values = matches!(operator.as_str(), "In" | "NotIn");
        if values.is_empty() == needs_values {
            let what = if needs_values { "needs values" } else { "takes no values" };
            return Err(ParseExpressionError(format!("operator {operator} of key {key} {what}")));
        }
        Ok(LabelSelectorRequirement { key, operator, values: Some(values) })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[rstest]
    #[case::equal("{matchLabels: {app: web}}", true)]
    #[case::not_equal("{matchLabels: {app: db}}", false)]
    #[case::absent("{matchLabels: {tier: one}}", false)]
    #[case::one_of("{matchExpressions: [{key: app, operator: In, values: [web, db]}]}", true)]
    #[case::none_of("{matchExpressions: [{key: app, operator: NotIn, values: [web]}]}", false)]
    #[case::none_of_an_absent_key("{matchExpressions: [{key: tier, operator: NotIn, values: [one]}]}", true)]
    #[case::in_an_absent_key("{matchExpressions: [{key: tier, operator: In, values: [one]}]}", false)]
    #[case::exists("{matchExpressions: [{key: app, operator: Exists}]}", true)]
    #[case::does_not_exist("{matchExpressions: [{key: app, operator: DoesNotExist}]}", false)]
    #[case::all_must_hold(
        "{matchLabels: {app: web}, matchExpressions: [{key: tier, operator: Exists}]}",
        false
    )]
    #[case::empty("{}", true)]
    fn requirements(#[case] selector: &str, #[case] matches: bool) {
        let [enablement] = &parse(&format!("[{{podSelector: {selector}}}]")).unwrap()[..] else {
            panic!("one selector");
        };
        assert_eq!(enablement.matches(&labels(&[("app", "web")]), &Labels::new()), matches);
    }

    #[rstest]
    #[case::misspelt("[{podSelector: {matchLables: {a: b}}}]")]
    #[case::unknown_operator("[{podSelector: {matchExpressions: [{key: a, operator: Gt, values: ['1']}]}}]")]
    #[case::in_without_values("[{podSelector: {matchExpressions: [{key: a, operator: In}]}}]")]
    #[case::exists_with_values(
        "[{podSelector: {matchExpressions: [{key: a, operator: Exists, values: [b]}]}}]"
    )]
    #[case::no_list("podSelector: {}")]
    #[case::no_yaml("[{")]
    fn what_is_no_selector(#[case] text: &str) {
        assert!(parse(text).is_err());
    }

    #[test]
    fn an_empty_list_selects_nothing() {
        assert_eq!(parse("[]").unwrap(), []);
    }
}
