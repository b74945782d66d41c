//! The netns of pods that run already, when no runtime told it: one look through `/proc` for all of them.
//!
//! A process belongs to a pod by its cgroup, and its netns is the pod's only if one of the pod's addresses
//! is there: a process may have entered the host's netns, or made one of its own. If several netns own the
//! address, the one with the oldest process is the sandbox's. What cannot be told apart is an error that
//! names the candidates, never a guess.

mod cgroup;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io,
    net::IpAddr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use procfs::process::{Process, all_processes_with_root};

use crate::enroll::{HostPaths, NetnsId, Redirect};

/// Where runtimes keep netns by name. A path there outlives any process.
const NETNS_DIRECTORIES: [&str; 3] = ["/var/run/netns", "/run/netns", "/var/run/docker/netns"];

/// A pod to look for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// By which the answer names it.
    pub uid: String,
    /// What its cgroup may be called after, besides the uid.
    pub hash: Option<String>,
    /// Its addresses. Without any it is not found.
    pub addresses: BTreeSet<IpAddr>,
}

/// A pod's netns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its path in the runtime's view.
    pub path: PathBuf,
    /// What the path must name.
    pub id: NetnsId,
    /// The container of its oldest process: the sandbox, if that has one.
    pub container: Option<String>,
}

/// Why a pod's netns is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfound {
    /// There is none.
    #[error("no process of the pod is found in /proc by its cgroup")]
    NoProcess,
    /// It has processes, all of them elsewhere.
    #[error("none of the pod's addresses is in the network namespace of its processes: {candidates}")]
    NotItsAddress {
        /// Processes and their netns.
        candidates: Candidates,
    },
    /// Nothing tells them apart.
    #[error("several network namespaces own the pod's address and are equally old: {candidates}")]
    Ambiguous {
        /// Processes and their netns.
        candidates: Candidates,
    },
}

/// Processes, by which to look further.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidates(Vec<(i32, NetnsId)>);

impl std::fmt::Display for Candidates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, (pid, id)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}pid {pid} in {id}")?;
        }
        Ok(())
    }
}

/// The oldest process of a pod in one netns.
#[derive(Clone, Debug)]
struct Candidate {
    pid: i32,
    /// Clock ticks after boot.
    start: u64,
    id: NetnsId,
    container: Option<String>,
}

/// Candidates by normal uid, and those of CRI-O that name none.
#[derive(Debug, Default)]
struct Processes {
    by_uid: HashMap<String, BTreeMap<(u64, u64), Candidate>>,
    unnamed: BTreeMap<(u64, u64), Candidate>,
}

/// Looks for all of them at once. `host` is the host's netns, which is nobody's. Takes some ten
/// microseconds for each process of the node.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn scan<R: Redirect>(
    redirect: &R,
    paths: &HostPaths,
    host: Option<NetnsId>,
    wanted: &[Wanted],
) -> io::Result<BTreeMap<String, Result<Found, Unfound>>> {
    let processes = processes(&paths.proc, host, wanted)?;
    let named = named_netns(paths);
    let owned = |candidate: &Candidate, addresses: &BTreeSet<IpAddr>| {
        let netns = redirect.open(&netns_of(&paths.proc, candidate.pid)).ok();
        // The process may have ended, and its number be another's.
        let netns = netns.filter(|netns| NetnsId::of(netns).is_ok_and(|id| id == candidate.id));
        let own = netns.and_then(|netns| redirect.addresses(&netns).ok());
        own.is_some_and(|own| own.iter().any(|address| addresses.contains(&address.to_canonical())))
    };
    let find = |pod: &Wanted| {
        let uids = [Some(&pod.uid), pod.hash.as_ref()].into_iter().flatten();
        let mut candidates: BTreeMap<_, &Candidate> = BTreeMap::new();
        for uid in uids {
            let of_uid = processes.by_uid.get(&cgroup::normal(uid)).into_iter().flatten();
            candidates.extend(of_uid.map(|(id, candidate)| (*id, candidate)));
        }
        let is_named = !candidates.is_empty();
        if !is_named {
            candidates = processes.unnamed.iter().map(|(id, candidate)| (*id, candidate)).collect();
        }
        let mut owning: Vec<_> =
            candidates.values().copied().filter(|candidate| owned(candidate, &pod.addresses)).collect();
        owning.sort_by_key(|candidate| candidate.start);
        match (owning.as_slice(), is_named) {
            ([], true) => Err(Unfound::NotItsAddress {
                candidates: listed(&candidates.into_values().collect::<Vec<_>>()),
            }),
            ([], false) => Err(Unfound::NoProcess),
            ([one], _) => Ok(found(&named, one)),
            ([first, second, ..], true) if first.start < second.start => Ok(found(&named, first)),
            (several, _) => Err(Unfound::Ambiguous { candidates: listed(several) }),
        }
    };
    Ok(wanted.iter().map(|pod| (pod.uid.clone(), find(pod))).collect())
}

fn found(named: &HashMap<NetnsId, PathBuf>, candidate: &Candidate) -> Found {
    let by_process = || Path::new("/proc").join(candidate.pid.to_string()).join("ns/net");

    Found {
        path: named.get(&candidate.id).cloned().unwrap_or_else(by_process),
        id: candidate.id,
        container: candidate.container.clone(),
    }
}

fn listed(candidates: &[&Candidate]) -> Candidates {
    Candidates(candidates.iter().map(|candidate| (candidate.pid, candidate.id)).collect())
}

/// The processes of the wanted pods, the oldest of each netns.
fn processes(proc: &Path, host: Option<NetnsId>, wanted: &[Wanted]) -> io::Result<Processes> {
    let uids: BTreeSet<String> = wanted
        .iter()
        .flat_map(|pod| [Some(&pod.uid), pod.hash.as_ref()])
        .flatten()
        .map(|uid| cgroup::normal(uid))
        .collect();
    let mut found = Processes::default();
    for process in all_processes_with_root(proc).map_err(io::Error::other)? {
        // One that ended meanwhile is of no use.
        let Some((owner, candidate)) = process.ok().and_then(|process| look(proc, &process, host, &uids))
        else {
            continue;
        };
        for uid in owner.uids {
            keep_oldest(found.by_uid.entry(uid).or_default(), candidate.clone());
        }
        if owner.is_of_crio {
            keep_oldest(&mut found.unnamed, candidate);
        }
    }
    Ok(found)
}

fn look(
    proc: &Path,
    process: &Process,
    host: Option<NetnsId>,
    uids: &BTreeSet<String>,
) -> Option<(cgroup::Owner, Candidate)> {
    let id = id_of(&netns_of(proc, process.pid))?;
    if Some(id) == host {
        return None;
    }
    let cgroups = process.cgroups().ok()?;
    let paths: Vec<&str> = cgroups.0.iter().map(|cgroup| cgroup.pathname.as_str()).collect();
    let mut owner = cgroup::owner(&paths);
    owner.uids.retain(|uid| uids.contains(uid));
    if owner.uids.is_empty() && !owner.is_of_crio {
        return None;
    }
    let start = process.stat().ok()?.starttime;
    let container = owner.container.clone();
    Some((owner, Candidate { pid: process.pid, start, id, container }))
}

fn keep_oldest(candidates: &mut BTreeMap<(u64, u64), Candidate>, candidate: Candidate) {
    let known = candidates.entry((candidate.id.dev, candidate.id.ino)).or_insert_with(|| candidate.clone());
    if candidate.start < known.start {
        *known = candidate;
    }
}

fn netns_of(proc: &Path, pid: i32) -> PathBuf {
    proc.join(pid.to_string()).join("ns/net")
}

/// Of the netns at a path of this process's view.
pub fn id_of(path: &Path) -> Option<NetnsId> {
    let found = fs::metadata(path).ok()?;
    Some(NetnsId { dev: found.dev(), ino: found.ino() })
}

/// Paths of netns in the runtime's view.
fn named_netns(paths: &HostPaths) -> HashMap<NetnsId, PathBuf> {
    let mut named = HashMap::new();
    for directory in NETNS_DIRECTORIES.map(Path::new) {
        let Ok(entries) = fs::read_dir(paths.of_netns(directory)) else {
            continue;
        };
        for entry in entries.flatten() {
            if let Some(id) = id_of(&entry.path()) {
                named.entry(id).or_insert_with(|| directory.join(entry.file_name()));
            }
        }
    }
    named
}
