//! The file of standalone mode: namespaces, and those pods that have something of their own to say.
//!
//! ```yaml
//! namespaces:
//!   shop:
//!     labels: {istio.io/dataplane-mode: ambient}
//! pods:
//! - namespace: shop
//!   name: batch-0
//!   serviceAccount: batch
//!   labels: {istio.io/dataplane-mode: none}
//! ```
//!
//! A pod that already runs is enrolled only if its entry has `uid` and `addresses`: they are how its netns
//! is found and known.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::{
    Decision, Described, Named, Undecided,
    predicate::{Rule, Traits, bypasses_inbound},
    selector::Labels,
};
use crate::enroll::Pod;

/// Kubernetes' name for the account of a pod that names none.
const DEFAULT_ACCOUNT: &str = "default";

/// Content of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct File {
    namespaces: BTreeMap<String, Namespace>,
    pods: Vec<Entry>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Namespace {
    labels: Labels,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Entry {
    namespace: String,
    name: String,
    uid: Option<String>,
    service_account: Option<String>,
    #[serde(default)]
    labels: Labels,
    #[serde(default)]
    annotations: Labels,
    #[serde(default)]
    host_network: bool,
    #[serde(default)]
    addresses: BTreeSet<IpAddr>,
}

/// Why there is no content.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// The system's word.
        source: io::Error,
    },
    /// It is not as described above.
    #[error("{path} is damaged: {why}")]
    Damaged {
        /// Which.
        path: PathBuf,
        /// Where and how.
        why: String,
    },
}

impl File {
    /// Reads the file.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text =
            fs::read_to_string(path).map_err(|source| Error::Unreadable { path: path.to_owned(), source })?;
        let damaged = |why: String| Error::Damaged { path: path.to_owned(), why };
        let file: Self = serde_saphyr::from_str(&text).map_err(|error| damaged(error.to_string()))?;
        let mut names = BTreeSet::new();
        for pod in &file.pods {
            if !names.insert((&pod.namespace, &pod.name)) {
                return Err(damaged(format!("pod {}/{} is there twice", pod.namespace, pod.name)));
            }
        }
        Ok(file)
    }

    /// Decides over a pod. One that the file does not name has neither labels nor annotations.
    pub fn decide(&self, rule: &Rule, named: &Named) -> Result<Decision, Undecided> {
        let Named { namespace, name, uid } = named;
        let none = Labels::new();
        let entry = self.pods.iter().find(|pod| (&pod.namespace, &pod.name) == (namespace, name));
        if let Some(known) = entry.and_then(|entry| entry.uid.as_ref())
            && let Some(told) = uid.as_ref().filter(|told| *told != known)
        {
            let (namespace, name) = (namespace.clone(), name.clone());
            return Err(Undecided::Another { namespace, name, known: known.clone(), told: told.clone() });
        }
        let traits = self.traits(namespace, entry, &none);
        if !rule.includes(&traits) {
            return Ok(Decision::Outside);
        }
        let own = entry.and_then(|entry| entry.uid.as_ref());
        let pod = Pod {
            uid: uid.as_ref().or(own).cloned().unwrap_or_else(|| format!("{namespace}/{name}")),
            namespace: namespace.clone(),
            name: name.clone(),
            service_account: account(entry),
        };
        Ok(Decision::Member { pod, bypass_inbound: bypasses_inbound(traits.annotations) })
    }

    /// The pods that the file names by uid.
    pub fn described(&self, rule: &Rule) -> Vec<Described> {
        let none = Labels::new();
        let described = self.pods.iter().filter_map(|entry| {
            let traits = self.traits(&entry.namespace, Some(entry), &none);
            Some(Described {
                pod: Pod {
                    uid: entry.uid.clone()?,
                    namespace: entry.namespace.clone(),
                    name: entry.name.clone(),
                    service_account: account(Some(entry)),
                },
                hash: None,
                member: Some(rule.includes(&traits)),
                bypass_inbound: bypasses_inbound(traits.annotations),
                addresses: entry.addresses.iter().map(IpAddr::to_canonical).collect(),
                has_ended: false,
            })
        });
        described.collect()
    }

    /// Namespaces in which a pod may be one of the mesh: a selector matches, or a single pod does.
    pub fn scope(&self, rule: &Rule) -> BTreeSet<String> {
        let none = Labels::new();
        let named = self.namespaces.iter().filter(|(name, own)| rule.names_namespace(name, &own.labels));
        let matched =
            self.pods.iter().filter(|pod| rule.includes(&self.traits(&pod.namespace, Some(pod), &none)));
        named.map(|(name, _)| name.clone()).chain(matched.map(|pod| pod.namespace.clone())).collect()
    }

    fn traits<'a>(&'a self, namespace: &'a str, entry: Option<&'a Entry>, none: &'a Labels) -> Traits<'a> {
        Traits {
            namespace,
            namespace_labels: self.namespaces.get(namespace).map_or(none, |namespace| &namespace.labels),
            labels: entry.map_or(none, |entry| &entry.labels),
            annotations: entry.map_or(none, |entry| &entry.annotations),
            host_network: entry.is_some_and(|entry| entry.host_network),
        }
    }
}

fn account(entry: Option<&Entry>) -> String {
    entry.and_then(|entry| entry.service_account.as_deref()).unwrap_or(DEFAULT_ACCOUNT).to_owned()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::membership::selector;

    const FILE: &str = "
namespaces:
  shop:
    labels: {istio.io/dataplane-mode: ambient}
  plain: {}
pods:
- {namespace: shop, name: out, labels: {istio.io/dataplane-mode: none}}
- {namespace: shop, name: host, hostNetwork: true}
- {namespace: shop, name: sidecar, annotations: {sidecar.istio.io/status: ''}}
- {namespace: shop, name: batch, uid: u7, serviceAccount: batch, annotations: {ambient.istio.io/bypass-inbound-capture: 'true'}}
- {namespace: alone, name: in, labels: {istio.io/dataplane-mode: ambient}}
- {namespace: excluded, name: in, labels: {istio.io/dataplane-mode: ambient}}
";

    fn rule() -> Rule {
        Rule {
            selectors: selector::parse(selector::DEFAULT).unwrap(),
            excluded: ["excluded".to_owned()].into(),
        }
    }

    fn read(text: &str) -> Result<File, Error> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mesh.yaml");
        fs::write(&path, text).unwrap();
        File::read(&path)
    }

    fn named(namespace: &str, name: &str, uid: Option<&str>) -> Named {
        Named { namespace: namespace.into(), name: name.into(), uid: uid.map(Into::into) }
    }

    #[rstest]
    #[case::by_its_namespace("shop", "web", true)]
    #[case::opted_out("shop", "out", false)]
    #[case::on_the_host("shop", "host", false)]
    #[case::with_a_sidecar("shop", "sidecar", false)]
    #[case::namespace_without_labels("plain", "web", false)]
    #[case::namespace_that_is_not_there("nowhere", "web", false)]
    #[case::by_itself("alone", "in", true)]
    #[case::neighbour_of_one_by_itself("alone", "other", false)]
    #[case::excluded("excluded", "in", false)]
    fn pods(#[case] namespace: &str, #[case] name: &str, #[case] member: bool) {
        let decision = read(FILE).unwrap().decide(&rule(), &named(namespace, name, Some("u1"))).unwrap();
        assert_eq!(matches!(decision, Decision::Member { .. }), member, "{decision:?}");
    }

    #[test]
    fn a_member_has_its_own_identity() {
        let decision = read(FILE).unwrap().decide(&rule(), &named("shop", "batch", None)).unwrap();
        let pod = Pod {
            uid: "u7".into(),
            namespace: "shop".into(),
            name: "batch".into(),
            service_account: "batch".into(),
        };
        assert_eq!(decision, Decision::Member { pod, bypass_inbound: true });
    }

    #[test]
    fn a_pod_of_the_same_name_is_not_the_same_pod() {
        let undecided = read(FILE).unwrap().decide(&rule(), &named("shop", "batch", Some("u8"))).unwrap_err();
        assert!(matches!(undecided, Undecided::Another { .. }), "{undecided}");
    }

    #[test]
    fn the_scope_is_where_a_selector_or_a_single_pod_matches() {
        let scope = read(FILE).unwrap().scope(&rule());
        assert_eq!(scope, ["alone".to_owned(), "shop".to_owned()].into());
    }

    #[rstest]
    #[case::misspelt("namespace: {}")]
    #[case::pod_without_a_name("pods: [{namespace: shop}]")]
    #[case::pod_twice("pods: [{namespace: a, name: b}, {namespace: a, name: b}]")]
    #[case::truncated("namespaces: {shop: {labels")]
    fn a_damaged_file_is_an_error(#[case] text: &str) {
        assert!(matches!(read(text), Err(Error::Damaged { .. })));
    }
}
