//! Whether a pod is one of the mesh: Istio's rule (`cni/pkg/util/podutil.go`, ambient-behaviour §4.1).

use std::collections::BTreeSet;

use super::selector::{Enablement, Labels};

/// Where a sidecar was injected, whatever the value says.
pub const SIDECAR_STATUS: &str = "sidecar.istio.io/status";
/// Lets inbound connections pass ztunnel.
pub const BYPASS_INBOUND: &str = "ambient.istio.io/bypass-inbound-capture";

/// What counts of a pod.
#[derive(Clone, Debug)]
pub struct Traits<'a> {
    /// Namespace.
    pub namespace: &'a str,
    /// Labels of the namespace.
    pub namespace_labels: &'a Labels,
    /// Labels of the pod.
    pub labels: &'a Labels,
    /// Annotations of the pod.
    pub annotations: &'a Labels,
    /// `spec.hostNetwork`.
    pub host_network: bool,
}

/// Which pods are of the mesh.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Ways in.
    pub selectors: Vec<Enablement>,
    /// Namespaces without any.
    pub excluded: BTreeSet<String>,
}

impl Rule {
    /// Whether the pod is one of the mesh.
    pub fn includes(&self, pod: &Traits<'_>) -> bool {
        !pod.host_network
            && !pod.annotations.contains_key(SIDECAR_STATUS)
            && !self.excluded.contains(pod.namespace)
            && self.selectors.iter().any(|selector| selector.matches(pod.labels, pod.namespace_labels))
    }

    /// Whether the namespace's own labels put it into the scope.
    pub fn names_namespace(&self, namespace: &str, labels: &Labels) -> bool {
        !self.excluded.contains(namespace)
            && self.selectors.iter().any(|selector| selector.names_namespace(labels))
    }
}

/// Whether the pod's inbound connections are not captured.
pub fn bypasses_inbound(annotations: &Labels) -> bool {
    annotations.get(BYPASS_INBOUND).is_some_and(|value| value == "true")
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::membership::selector::{self, DEFAULT};

    const MODE: &str = "istio.io/dataplane-mode";

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn rule() -> Rule {
        Rule { selectors: selector::parse(DEFAULT).unwrap(), excluded: ["kube-system".to_owned()].into() }
    }

    #[rstest]
    #[case::nothing_says_so("shop", &[], &[], &[], false, false)]
    #[case::namespace("shop", &[(MODE, "ambient")], &[], &[], false, true)]
    #[case::pod("shop", &[], &[(MODE, "ambient")], &[], false, true)]
    #[case::pod_opts_out("shop", &[(MODE, "ambient")], &[(MODE, "none")], &[], false, false)]
    #[case::namespace_opts_out("shop", &[(MODE, "none")], &[], &[], false, false)]
    #[case::namespace_opts_out_and_pod_in("shop", &[(MODE, "none")], &[(MODE, "ambient")], &[], false, true)]
    #[case::other_value("shop", &[(MODE, "Ambient")], &[], &[], false, false)]
    #[case::host_network("shop", &[(MODE, "ambient")], &[(MODE, "ambient")], &[], true, false)]
    #[case::sidecar("shop", &[(MODE, "ambient")], &[], &[(SIDECAR_STATUS, "{}")], false, false)]
    #[case::sidecar_of_any_value("shop", &[(MODE, "ambient")], &[], &[(SIDECAR_STATUS, "")], false, false)]
    #[case::excluded("kube-system", &[(MODE, "ambient")], &[(MODE, "ambient")], &[], false, false)]
    fn who_is_in_the_mesh(
        #[case] namespace: &str,
        #[case] namespace_labels: &[(&str, &str)],
        #[case] pod_labels: &[(&str, &str)],
        #[case] annotations: &[(&str, &str)],
        #[case] host_network: bool,
        #[case] included: bool,
    ) {
        let (namespace_labels, pod_labels, annotations) =
            (labels(namespace_labels), labels(pod_labels), labels(annotations));
        let pod = Traits {
            namespace,
            namespace_labels: &namespace_labels,
            labels: &pod_labels,
            annotations: &annotations,
            host_network,
        };
        assert_eq!(rule().includes(&pod), included);
    }

    #[rstest]
    #[case::empty_selector_matches_everything("[{}]", true)]
    #[case::empty_list_matches_nothing("[]", false)]
    fn selectors_without_requirements(#[case] selectors: &str, #[case] included: bool) {
        let none = Labels::new();
        let rule = Rule { selectors: selector::parse(selectors).unwrap(), excluded: BTreeSet::new() };
        let pod = Traits {
            namespace: "shop",
            namespace_labels: &none,
            labels: &none,
            annotations: &none,
            host_network: false,
        };
        assert_eq!(rule.includes(&pod), included);
        // An empty namespace selector is no statement about a namespace.
        assert!(!rule.names_namespace("shop", &none));
    }

    #[rstest]
    #[case::labelled("shop", &[(MODE, "ambient")], true)]
    #[case::not_labelled("shop", &[], false)]
    #[case::excluded("kube-system", &[(MODE, "ambient")], false)]
    fn which_namespaces_are_in_the_scope(
        #[case] namespace: &str,
        #[case] namespace_labels: &[(&str, &str)],
        #[case] named: bool,
    ) {
        assert_eq!(rule().names_namespace(namespace, &labels(namespace_labels)), named);
    }
}
