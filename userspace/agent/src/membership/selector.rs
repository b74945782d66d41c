//! Enablement selectors: Istio's `AMBIENT_ENABLEMENT_SELECTOR`.
//!
//! A YAML list of `{podSelector, namespaceSelector}`, each a label selector of Kubernetes. A misspelt key
//! is an error here: in Istio it makes the selector empty, and an empty selector matches everything.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Labels of a pod or a namespace.
pub type Labels = BTreeMap<String, String>;

/// A label selector (`LabelSelector` of `meta/v1`): all its requirements hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Selector {
    match_labels: Labels,
    match_expressions: Vec<Expression>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Expression {
    key: String,
    operator: Operator,
    #[serde(default)]
    values: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum Operator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
}

impl Selector {
    /// Whether all requirements hold. An empty selector has none.
    pub fn matches(&self, labels: &Labels) -> bool {
        self.match_labels.iter().all(|(key, value)| labels.get(key) == Some(value))
            && self.match_expressions.iter().all(|expression| expression.matches(labels))
    }

    /// Whether it has no requirement.
    pub fn is_empty(&self) -> bool {
        self.match_labels.is_empty() && self.match_expressions.is_empty()
    }
}

impl Expression {
    fn matches(&self, labels: &Labels) -> bool {
        let value = labels.get(&self.key);
        match self.operator {
            Operator::In => value.is_some_and(|value| self.values.contains(value)),
            Operator::NotIn => value.is_none_or(|value| !self.values.contains(value)),
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
        }
    }
}

/// One way into the mesh: both selectors match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Enablement {
    pod_selector: Selector,
    namespace_selector: Selector,
}

impl Enablement {
    /// Whether a pod is selected.
    pub fn matches(&self, pod: &Labels, namespace: &Labels) -> bool {
        self.pod_selector.matches(pod) && self.namespace_selector.matches(namespace)
    }

    /// Whether the namespace alone says that its pods may be selected.
    pub fn names_namespace(&self, namespace: &Labels) -> bool {
        !self.namespace_selector.is_empty() && self.namespace_selector.matches(namespace)
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
    let selectors: Vec<Enablement> =
        serde_saphyr::from_str(text).map_err(|error| Unreadable(Box::new(error)))?;
    let expressions = selectors
        .iter()
        .flat_map(|enablement| [&enablement.pod_selector, &enablement.namespace_selector])
        .flat_map(|selector| &selector.match_expressions);
    for Expression { key, operator, values } in expressions {
        let needs_values = matches!(operator, Operator::In | Operator::NotIn);
        if values.is_empty() == needs_values {
            let what = if needs_values { "needs values" } else { "takes no values" };
            let error = serde::de::Error::custom(format!("operator {operator:?} of key {key} {what}"));
            return Err(Unreadable(Box::new(error)));
        }
    }
    Ok(selectors)
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
