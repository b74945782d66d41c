//! Pods that always pass: the agent's own and ztunnel's.

use serde::{Deserialize, Serialize};

/// Letters and digits that Kubernetes appends to the name of a DaemonSet's pod.
const SUFFIX: usize = 5;

/// The pods of one DaemonSet. A node could never start its agent again if the plugin asked the agent
/// about the agent's own pod.
///
/// The name is all that a runtime tells of a pod, so whoever may create pods in that namespace may
/// give one a name that passes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exempt {
    /// Namespace of the DaemonSet.
    pub namespace: String,
    /// Its name.
    pub daemonset: String,
}

impl Exempt {
    /// Whether the pod is in the namespace and its name is `^<daemonset>-[a-z0-9]{5}$`.
    pub fn covers(&self, namespace: &str, pod: &str) -> bool {
        namespace == self.namespace
            && pod.strip_prefix(&self.daemonset).and_then(|rest| rest.strip_prefix('-')).is_some_and(
                |suffix| {
                    suffix.len() == SUFFIX
                        && suffix.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
                },
            )
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::the_daemonset_s_pod("culvert-system", "culvert-node-x7k2p", true)]
    #[case::another_namespace("default", "culvert-node-x7k2p", false)]
    #[case::another_pod("culvert-system", "web-x7k2p", false)]
    #[case::no_suffix("culvert-system", "culvert-node", false)]
    #[case::short_suffix("culvert-system", "culvert-node-x7k2", false)]
    #[case::long_suffix("culvert-system", "culvert-node-x7k2pp", false)]
    #[case::upper_case("culvert-system", "culvert-node-X7K2P", false)]
    #[case::longer_name("culvert-system", "culvert-node-web-x7k2p", false)]
    #[case::non_ascii("culvert-system", "culvert-node-éé1", false)]
    fn the_name_decides_with_the_namespace(
        #[case] namespace: &str,
        #[case] pod: &str,
        #[case] covered: bool,
    ) {
        let exempt = Exempt { namespace: "culvert-system".into(), daemonset: "culvert-node".into() };
        assert_eq!(exempt.covers(namespace, pod), covered);
    }
}
