//! The node's part: programs on the cgroup root, shared maps, and what an earlier process left.

use std::{
    collections::{BTreeSet, HashSet},
    fs::File,
    io,
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::Path,
    sync::Arc,
};

use aya::{
    Ebpf,
    maps::MapInfo,
    programs::{Program, ProgramError, ProgramInfo, RawTracePoint, links::FdLink, loaded_programs},
};
use aya_obj::generated::bpf_attach_type::{
    self, BPF_CGROUP_INET_SOCK_CREATE, BPF_CGROUP_INET4_BIND, BPF_CGROUP_INET4_CONNECT,
    BPF_CGROUP_INET6_BIND, BPF_CGROUP_INET6_CONNECT, BPF_CGROUP_SETSOCKOPT, BPF_CGROUP_SOCK_OPS,
};
use culvert_abi::{Counters, names};

use crate::{
    Config, Error, Netns, bpf,
    maps::Maps,
    object::{PodPrograms, Shape, expected_shape, load_node},
    pins::{Pins, unpin},
    watch::Watch,
};

/// The node's part, loaded and attached. Dropping it changes nothing for traffic: links and maps are
/// pinned. It holds the watcher that keeps each pod's routing and own addresses in step.
pub struct Dataplane {
    pub(crate) config: Config,
    pub(crate) host_netns: u64,
    pub(crate) pins: Pins,
    pub(crate) maps: Arc<Maps>,
    pub(crate) watch: Watch,
    pub(crate) programs: PodPrograms,
}

/// What is attached to the cgroup root, and how.
pub(crate) const CGROUP_PROGRAMS: [(&str, bpf_attach_type); 7] = [
    (names::SOCK_OPS, BPF_CGROUP_SOCK_OPS),
    (names::SOCK_CREATE, BPF_CGROUP_INET_SOCK_CREATE),
    (names::BIND4, BPF_CGROUP_INET4_BIND),
    (names::BIND6, BPF_CGROUP_INET6_BIND),
    (names::CONNECT4, BPF_CGROUP_INET4_CONNECT),
    (names::CONNECT6, BPF_CGROUP_INET6_CONNECT),
    (names::SETSOCKOPT, BPF_CGROUP_SETSOCKOPT),
];

impl Dataplane {
    /// Loads the node's part, or adopts the one that is pinned and replaces its programs in place.
    ///
    /// # Errors
    /// Nothing is changed when a pinned map has another layout. See [`crate::probe`] for what a kernel
    /// or container may lack.
    pub fn start(config: &Config) -> Result<Self, Error> {
        let host_netns = Netns::open(&config.host_netns)?.cookie();
        let pins = Pins::create(&config.bpffs)?;
        check_pinned_maps(&pins)?;
        let mut node = load_node(&pins, host_netns)?;
        let maps = Arc::new(Maps::take(&mut node)?);
        let cgroup = File::open(&config.cgroup).map_err(Error::path("open cgroup", &config.cgroup))?;
        for (name, hook) in CGROUP_PROGRAMS {
            attach_to_cgroup(&mut node, name, hook, &cgroup, &pins.link(name))?;
        }
        attach_to_exit(&mut node, &pins.link(names::PROCESS_EXIT))?;
        let watch = Watch::start(Arc::clone(&maps))?;
        let programs = PodPrograms::start(&pins)?;
        let dataplane = Self { config: config.clone(), host_netns, pins, maps, watch, programs };
        dataplane.adopt_pods()?;
        Ok(dataplane)
    }

    /// What happened to the connections of a netns, all CPUs together. Cookie 0 counts what belongs to
    /// no pod.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn counters(&self, netns: u64) -> Result<Counters, Error> {
        self.maps.counters(netns)
    }

    /// Removes the pinned links of netns that are gone, with everything else that was theirs, and
    /// returns their cookies.
    ///
    /// # Errors
    /// When the pins cannot be read or removed.
    pub fn collect(&self) -> Result<Vec<u64>, Error> {
        let mut gone = Vec::new();
        for cookie in self.pins.pods()? {
            let path = self.pins.pod(cookie);
            let link = bpf::open_link(&path).map_err(Error::path("open pinned link", &path))?;
            if bpf::netns_inode(link.as_fd()).map_err(Error::path("read pinned link", &path))? == 0 {
                // A link that somebody detached looks the same. Its pod is refused, not let out.
                if self.watch.holds(cookie) {
                    tracing::error!(
                        netns = cookie,
                        "the program of a living pod was detached by somebody; its connections are refused until \
                         this process starts again"
                    );
                    continue;
                }
                drop(link);
                self.forget(cookie)?;
                gone.push(cookie);
            }
        }
        Ok(gone)
    }

    /// Replaces the program of each pod that an earlier process captured unless it is the same, and removes
    /// what is of no use.
    fn adopt_pods(&self) -> Result<(), Error> {
        let gone = self.collect()?;
        if !gone.is_empty() {
            tracing::info!(cookies = ?gone, "removed what was left of pods whose netns is gone");
        }
        // A process that was killed could not end them. Each ztunnel that is known stays so, and each new
        // ZDS connection has an introduction of its own.
        for netns in self.maps.introductions()? {
            self.maps.remove_pod(netns)?;
        }
        let pods = self.pins.pods()?;
        let up_to_date = if pods.is_empty() { HashSet::new() } else { self.up_to_date()? };
        for cookie in pods {
            let path = self.pins.pod(cookie);
            let link = bpf::open_link(&path).map_err(Error::path("open pinned link", &path))?;
            let program = bpf::program_id(link.as_fd()).map_err(Error::path("read pinned link", &path))?;
            if !up_to_date.contains(&program) {
                self.renew(cookie)?;
            }
        }
        Ok(())
    }

    /// Replaces a pod's program in place by a new instance, which no connection notices. A start does it
    /// for each pod whose program is another version's.
    ///
    /// # Errors
    /// When the pod has no pinned link.
    pub fn renew(&self, netns: u64) -> Result<(), Error> {
        let path = self.pins.pod(netns);
        let link = bpf::open_link(&path).map_err(Error::path("open pinned link", &path))?;
        let mut program = self.programs.take(netns)?;
        bpf::update_link(link.as_fd(), program.fd()?).map_err(Error::path("update pinned link", &path))
    }

    /// Ids of the loaded programs that are as the pod object's: the same instructions (by their tag) on
    /// the same shared maps.
    fn up_to_date(&self) -> Result<HashSet<u32>, Error> {
        let failed = || program_error("inspect", names::SK_LOOKUP);
        let pinned = |name| MapInfo::from_pin(self.pins.map(name)).map(|map| map.id());
        let shared: HashSet<u32> = names::MAPS
            .into_iter()
            .map(|name| pinned(name).map_err(Error::map("read pinned", name)))
            .collect::<Result<_, _>>()?;
        let identity = |program: &ProgramInfo| -> Result<(u64, BTreeSet<u32>), Error> {
            let maps = program.map_ids().map_err(failed())?.unwrap_or_default();
            Ok((program.tag(), maps.into_iter().filter(|map| shared.contains(map)).collect()))
        };
        // One that no pod gets: the cookie of no netns.
        let mut sample = self.programs.take(0)?;
        let ours = sample.sk_lookup()?.info().map_err(failed())?;
        let (tag, ours) = (ours.tag(), identity(&ours)?);
        let mut same = HashSet::new();
        for program in loaded_programs() {
            // One that is unloaded while we look is nobody's.
            let Ok(program) = program else { continue };
            if program.tag() == tag && identity(&program).is_ok_and(|found| found == ours) {
                same.insert(program.id());
            }
        }
        Ok(same)
    }
}

pub(crate) fn program_error(action: &'static str, program: &str) -> impl FnOnce(ProgramError) -> Error {
    let program = program.to_owned();
    move |source| Error::Program { action, program, source: Box::new(source) }
}

pub(crate) fn missing_program(object: &'static str, name: &str) -> Error {
    Error::Object { object, reason: format!("it has no program {name}") }
}

/// aya takes over a pinned map of the right name whatever its type and sizes are.
fn check_pinned_maps(pins: &Pins) -> Result<(), Error> {
    for name in names::MAPS {
        let path = pins.map(name);
        if !path.exists() {
            continue;
        }
        let read = |source| Error::map("read pinned", name)(source);
        let info = MapInfo::from_pin(&path).map_err(read)?;
        let found = Shape {
            kind: info.map_type().map_err(read)? as u32,
            key: info.key_size(),
            value: info.value_size(),
            entries: info.max_entries(),
            flags: info.map_flags(),
        };
        let expected = expected_shape(name)?;
        if found != expected {
            let difference = format!("found {found:?}, expected {expected:?}");
            return Err(Error::PinMismatch { path, difference, directory: pins.root().into() });
        }
    }
    Ok(())
}

/// Attaches by a pinned link. A link that an earlier process pinned gets the new program; if it is
/// attached to another cgroup, a new link takes its place.
fn attach_to_cgroup(
    node: &mut Ebpf,
    name: &'static str,
    hook: bpf_attach_type,
    cgroup: &File,
    pin: &Path,
) -> Result<(), Error> {
    let program = node.program_mut(name).ok_or_else(|| missing_program("node.o", name))?;
    load(program).map_err(program_error("load", name))?;
    let program = program.fd().map_err(program_error("find", name))?;
    if pin.exists() {
        let link = bpf::open_link(pin).map_err(Error::path("open pinned link", pin))?;
        let id = cgroup.metadata().map_err(Error::system("fstat of the cgroup"))?.ino();
        if bpf::cgroup_id(link.as_fd()).map_err(Error::path("read pinned link", pin))? == id {
            return bpf::update_link(link.as_fd(), program.as_fd())
                .map_err(Error::path("update pinned link", pin));
        }
        tracing::warn!(program = name, "the pinned link is attached to another cgroup; replacing it");
        unpin(pin)?;
    }
    let link = bpf::attach_to_cgroup(program.as_fd(), cgroup.as_fd(), hook as u32).map_err(|source| {
        Error::Program {
            action: "attach",
            program: name.to_owned(),
            source: Box::new(ProgramError::IOError(source)),
        }
    })?;
    bpf::pin(link.as_fd(), pin).map_err(Error::path("pin link at", pin))
}

/// The kernel replaces no program in a link to a tracepoint (`bpf_raw_tp_link_lops` has no `update_prog`): the new
/// one is attached before the old one goes.
fn attach_to_exit(node: &mut Ebpf, pin: &Path) -> Result<(), Error> {
    let name = names::PROCESS_EXIT;
    let program = node.program_mut(name).ok_or_else(|| missing_program("node.o", name))?;
    let program: &mut RawTracePoint = program.try_into().map_err(program_error("find", name))?;
    program.load().map_err(program_error("load", name))?;
    let attached = program.attach("sched_process_exit").map_err(program_error("attach", name))?;
    let link: FdLink = program.take_link(attached).map_err(program_error("keep", name))?.into();
    unpin(pin)?;
    pin_link(link, pin)
}

/// Pins a new link, or lets it go.
pub(crate) fn pin_link(link: FdLink, path: &Path) -> Result<(), Error> {
    link.pin(path).map(drop).map_err(io::Error::other).map_err(Error::path("pin link at", path))
}

fn load(program: &mut Program) -> Result<(), ProgramError> {
    match program {
        Program::SockOps(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        Program::CgroupSockAddr(program) => program.load(),
        Program::CgroupSockopt(program) => program.load(),
        _ => Err(ProgramError::UnexpectedProgramType),
    }
}
