//! Which pod a process belongs to, by the names of its cgroups.
//!
//! Kubelet names a pod's cgroup after its uid, with either driver: `/kubepods/burstable/pod<uid>/<id>`,
//! `/kubepods-burstable-pod<uid with _>.slice/cri-containerd-<id>.scope`; below another root under kind,
//! k3d, or a private cgroup namespace (`/../../kubepods…`). A static pod has its hash there. CRI-O may put
//! containers outside the pod's cgroup: `/…/crio-<id>.scope` and no uid (Istio's patterns:
//! `cni/pkg/nodeagent/podcgroupns.go`).

use std::collections::BTreeSet;

/// Digits of a uid, without what stands between them.
const UID: usize = 32;

/// What the cgroups of a process say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Owner {
    /// Uids of pods, in the form of [`normal`]; more than one if kubelets are nested.
    pub(super) uids: BTreeSet<String>,
    /// The container. Of a sandbox's own process it is the sandbox, which is CNI's container.
    pub(super) container: Option<String>,
    /// It is a container of CRI-O, whose pod is not named.
    pub(super) is_of_crio: bool,
}

/// A uid or a static pod's hash, to compare: hexadecimal digits only.
pub(super) fn normal(uid: &str) -> String {
    uid.chars().filter(|c| !matches!(c, '-' | '_')).map(|c| c.to_ascii_lowercase()).collect()
}

/// Of all hierarchies that a process is in, v1, v2 or both. Those that say nothing do not count: in the
/// hybrid layout one of them may hold every process in its root.
pub(super) fn owner(paths: &[&str]) -> Owner {
    let mut owner = Owner::default();
    for path in paths {
        owner.uids.extend(uids(path));
        let container = path.rsplit('/').find_map(container);
        owner.is_of_crio |= path.rsplit('/').any(|part| part.starts_with("crio-"));
        owner.container = owner.container.or(container);
    }
    owner.is_of_crio &= owner.uids.is_empty();
    owner
}

/// Every `pod<uid>` that begins after punctuation.
fn uids(path: &str) -> impl Iterator<Item = String> {
    path.match_indices("pod").filter_map(|(at, pod)| {
        let is_word = path[..at].chars().next_back().is_some_and(|before| !before.is_alphanumeric());
        let rest = &path[at + pod.len()..];
        let mut uid = String::with_capacity(UID);
        for digit in rest.chars() {
            match digit {
                _ if uid.len() == UID => return (is_word && !digit.is_alphanumeric()).then_some(uid),
                '-' | '_' if !uid.is_empty() => {}
                _ if digit.is_ascii_hexdigit() => uid.push(digit.to_ascii_lowercase()),
                _ => return None,
            }
        }
        (is_word && uid.len() == UID).then_some(uid)
    })
}

/// The 64 hexadecimal digits at the end of a name.
fn container(name: &str) -> Option<String> {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let id = name.rsplit(|c: char| !c.is_alphanumeric()).next()?;
    (id.len() == 64 && id.chars().all(|c| c.is_ascii_hexdigit())).then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const UID: &str = "2c48913c29e7460b9bfe9e5d8a1c4f60";
    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[rstest]
    #[case::cgroupfs("/kubepods/burstable/pod2c48913c-29e7-460b-9bfe-9e5d8a1c4f60/ID")]
    #[case::guaranteed("/kubepods/pod2c48913c-29e7-460b-9bfe-9e5d8a1c4f60/ID")]
    #[case::systemd(
        "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod2c48913c_29e7_460b_9bfe_9e5d8a1c4f60.slice/cri-containerd-ID.scope"
    )]
    #[case::crio("/kubepods.slice/kubepods-pod2c48913c_29e7_460b_9bfe_9e5d8a1c4f60.slice/crio-ID.scope")]
    #[case::docker("/kubepods/besteffort/pod2c48913c-29e7-460b-9bfe-9e5d8a1c4f60/docker-ID.scope")]
    #[case::containerd_without_driver(
        "/system.slice/containerd.service/kubepods-burstable-pod2c48913c_29e7_460b_9bfe_9e5d8a1c4f60.slice:cri-containerd:ID"
    )]
    #[case::kind(
        "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod2c48913c_29e7_460b_9bfe_9e5d8a1c4f60.slice/cri-containerd-ID.scope"
    )]
    #[case::private_cgroup_namespace("/../../pod2c48913c-29e7-460b-9bfe-9e5d8a1c4f60/ID")]
    #[case::static_pod("/kubepods/burstable/pod2c48913c29e7460b9bfe9e5d8a1c4f60/ID")]
    #[case::systemd_inside("/kubepods/pod2c48913c-29e7-460b-9bfe-9e5d8a1c4f60/ID/init.scope")]
    fn a_pod_s_process(#[case] path: &str) {
        let path = path.replace("ID", ID);
        let expected =
            Owner { uids: [UID.to_owned()].into(), container: Some(ID.to_owned()), is_of_crio: false };
        assert_eq!(owner(&[path.as_str()]), expected);
        // Hybrid: the other hierarchy holds it in its root.
        assert_eq!(owner(&["/", path.as_str(), "/"]), expected);
    }

    #[rstest]
    #[case::root("/")]
    #[case::service("/system.slice/kubelet.service")]
    #[case::pod_without_container_name("/libpod_parent/libpod-ID")]
    #[case::too_long("/kubepods/pod2c48913c-29e7-460b-9bfe-9e5d8a1c4f6011")]
    #[case::too_short("/kubepods/pod2c48913c-29e7/ID")]
    #[case::part_of_a_word("/tripod2c48913c-29e7-460b-9bfe-9e5d8a1c4f60/ID")]
    fn of_no_pod(#[case] path: &str) {
        let found = owner(&[path.replace("ID", ID).as_str()]);
        assert_eq!((found.uids, found.is_of_crio), (BTreeSet::new(), false));
    }

    #[test]
    fn crio_may_name_the_container_only() {
        let path = format!("/machine.slice/crio-{ID}.scope");
        let expected = Owner { uids: BTreeSet::new(), container: Some(ID.to_owned()), is_of_crio: true };
        assert_eq!(owner(&[path.as_str()]), expected);
    }

    #[test]
    fn a_kubelet_inside_a_pod_leaves_both_uids() {
        let inner = "99999999-29e7-460b-9bfe-9e5d8a1c4f60";
        let path = format!("/kubepods/pod2c48913c-29e7-460b-9bfe-9e5d8a1c4f60/{ID}/kubepods/pod{inner}/{ID}");
        assert_eq!(owner(&[path.as_str()]).uids, [UID.to_owned(), normal(inner)].into());
    }
}
