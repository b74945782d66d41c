//! What a container runtime names when it speaks of a pod's network.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One interface of one container in one network. Istio's plugin names none of the three.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attachment {
    /// `name` of the network configuration.
    pub network: Option<String>,
    /// `CNI_CONTAINERID`: the sandbox.
    pub container_id: Option<String>,
    /// `CNI_IFNAME`.
    pub if_name: Option<String>,
}

impl Attachment {
    /// Whether a DEL or CHECK that names `self` means `other`. What it does not name, it means all of;
    /// what `other` does not know of itself, it may mean; without a container it means nothing.
    pub fn covers(&self, other: &Self) -> bool {
        let same =
            |named: &Option<String>, own: &Option<String>| named.is_none() || own.is_none() || named == own;
        self.container_id.is_some()
            && self.container_id == other.container_id
            && same(&self.network, &other.network)
            && same(&self.if_name, &other.if_name)
    }
}

impl fmt::Display for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |part: &Option<String>| part.clone().unwrap_or_else(|| "-".to_owned());
        write!(f, "{}/{}/{}", part(&self.network), part(&self.container_id), part(&self.if_name))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    pub(super) fn attachment(parts: [&str; 3]) -> Attachment {
        let [network, container_id, if_name] =
            parts.map(|part| Some(part.to_owned()).filter(|part| !part.is_empty()));
        Attachment { network, container_id, if_name }
    }

    #[rstest]
    #[case::exactly(["net", "c1", "eth0"], true)]
    #[case::all_interfaces(["net", "c1", ""], true)]
    #[case::all_networks(["", "c1", "eth0"], true)]
    #[case::another_network(["other", "c1", "eth0"], false)]
    #[case::another_container(["net", "c2", "eth0"], false)]
    #[case::another_interface(["net", "c1", "net1"], false)]
    #[case::no_container(["net", "", "eth0"], false)]
    fn what_a_del_means(#[case] named: [&str; 3], #[case] covered: bool) {
        assert_eq!(attachment(named).covers(&attachment(["net", "c1", "eth0"])), covered);
    }

    #[test]
    fn of_a_sandbox_that_was_found_by_its_processes_only_the_container_is_known() {
        let found = attachment(["", "c1", ""]);
        assert!(attachment(["net", "c1", "eth0"]).covers(&found));
        assert!(!attachment(["net", "c2", "eth0"]).covers(&found));
    }

    #[test]
    fn an_attachment_of_istio_s_plugin_is_meant_by_nobody() {
        assert!(!Attachment::default().covers(&Attachment::default()));
    }
}
