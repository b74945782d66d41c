//! What an enrolled pod has on the node, piece by piece: all of it must go with the pod.

use std::{
    collections::HashSet,
    fs, thread,
    time::{Duration, Instant},
};

use culvert_abi::names::{MAPS, POD_ADDRESSES, SOCKET_LABELS};

use crate::{
    footprint::{self, Footprint},
    node_agent::{NodeAgent, names},
    pod::Pod,
};

/// The reaper and a busy machine take their time.
const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(50);

impl NodeAgent<'_> {
    /// Everything on the node that is the pod's: pin, link, map entries, record, descriptors of the agent.
    pub fn traces_of(&self, pod: &Pod) -> Vec<String> {
        self.traces_of_all(&[pod])
    }

    /// [`traces_of`](Self::traces_of) many.
    pub fn traces_of_all(&self, pods: &[&Pod]) -> Vec<String> {
        let cookies: HashSet<u64> = pods.iter().map(|pod| pod.cookie()).collect();
        let lab = self.lab();
        let mut traces = Vec::new();
        for name in MAPS.into_iter().filter(|name| *name != SOCKET_LABELS) {
            let keys = lab.map(name).raw_keys();
            let own = |key: &&Vec<u8>| {
                key.chunks_exact(8).any(|chunk| {
                    chunk.try_into().is_ok_and(|chunk| cookies.contains(&u64::from_ne_bytes(chunk)))
                })
            };
            traces.extend(keys.iter().filter(own).map(|key| format!("{name} {key:02x?}")));
        }
        let addresses = lab.map(POD_ADDRESSES);
        for key in addresses.keys::<culvert_abi::Address>() {
            let owner: Option<u64> = addresses.get(&key);
            let own = owner.is_some_and(|owner| cookies.contains(&owner));
            traces.extend(own.then(|| format!("{POD_ADDRESSES} {key:?}")));
        }
        let own = |name: &String| {
            name.trim_end_matches(".json").parse().is_ok_and(|cookie| cookies.contains(&cookie))
        };
        let pins = names(&lab.config().bpffs.join("culvert/v1/pods"));
        traces.extend(pins.into_iter().filter(own).map(|name| format!("pin {name}")));
        traces.extend(self.records().into_iter().filter(own).map(|name| format!("record {name}")));
        let inodes: Vec<_> = pods.iter().map(|pod| footprint::inode(&pod.netns_path())).collect();
        traces.extend(footprint::links(&inodes, None));
        let netns: HashSet<_> = inodes.iter().map(|inode| format!("net:[{inode}]")).collect();
        traces.extend(self.descriptors().into_iter().filter(|target| netns.contains(target)));
        traces
    }

    /// Waits until the pod is as it was, and nothing of it is left on the node.
    #[track_caller]
    pub fn expect_no_trace(&self, pod: &Pod, before: &Footprint) {
        let deadline = Instant::now() + PATIENCE;
        let clean = || self.traces_of(pod).is_empty() && pod.footprint() == *before;
        while !clean() && Instant::now() < deadline {
            thread::sleep(PAUSE);
        }
        assert_eq!(self.traces_of(pod), [""; 0], "left of {}", pod.name());
        before.expect_same(&pod.footprint());
    }

    /// What its descriptors refer to, sockets aside.
    pub fn descriptors(&self) -> Vec<String> {
        let entries = fs::read_dir(format!("/proc/{}/fd", self.pid())).into_iter().flatten().flatten();
        let targets = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
        targets.map(|target| target.display().to_string()).collect()
    }
}
