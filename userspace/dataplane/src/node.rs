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
    programs::{
        CgroupAttachMode, Program, ProgramError, ProgramInfo,
        links::{FdLink, LinkError},
        loaded_programs,
    },
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

pub(crate) const NODE_PROGRAMS: [&str; 6] =
    [names::SOCK_OPS, names::SOCK_CREATE, names::BIND4, names::BIND6, names::CONNECT4, names::CONNECT6];

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
        for name in NODE_PROGRAMS {
            attach_to_cgroup(&mut node, name, &cgroup, &pins.link(name))?;
        }
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
fn attach_to_cgroup(node: &mut Ebpf, name: &'static str, cgroup: &File, pin: &Path) -> Result<(), Error> {
    let program = node.program_mut(name).ok_or_else(|| missing_program("node.o", name))?;
    load(program).map_err(program_error("load", name))?;
    if pin.exists() {
        let link = bpf::open_link(pin).map_err(Error::path("open pinned link", pin))?;
        let id = cgroup.metadata().map_err(Error::system("fstat of the cgroup"))?.ino();
        if bpf::cgroup_id(link.as_fd()).map_err(Error::path("read pinned link", pin))? == id {
            let program = program.fd().map_err(program_error("find", name))?;
            return bpf::update_link(link.as_fd(), program.as_fd())
                .map_err(Error::path("update pinned link", pin));
        }
        tracing::warn!(program = name, "the pinned link is attached to another cgroup; replacing it");
        unpin(pin)?;
    }
    let link = attach(program, cgroup).map_err(program_error("attach", name))?;
    pin_link(link, pin)
}

/// Pins a new link, or lets it go.
pub(crate) fn pin_link(link: Result<FdLink, LinkError>, path: &Path) -> Result<(), Error> {
    let pinned = link.map_err(io::Error::other).and_then(|link| link.pin(path).map_err(io::Error::other));
    pinned.map(drop).map_err(Error::path("pin link at", path))
}

fn load(program: &mut Program) -> Result<(), ProgramError> {
    match program {
        Program::SockOps(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        Program::CgroupSockAddr(program) => program.load(),
        _ => Err(ProgramError::UnexpectedProgramType),
    }
}

/// A link is always attached beside others ("multi"); `AllowMultiple` would be refused (EINVAL).
fn attach(program: &mut Program, cgroup: &File) -> Result<Result<FdLink, LinkError>, ProgramError> {
    let mode = CgroupAttachMode::Single;
    Ok(match program {
        Program::SockOps(program) => {
            let link = program.attach(cgroup, mode)?;
            program.take_link(link)?.try_into()
        }
        Program::CgroupSock(program) => {
            let link = program.attach(cgroup, mode)?;
            program.take_link(link)?.try_into()
        }
        Program::CgroupSockAddr(program) => {
            let link = program.attach(cgroup, mode)?;
            program.take_link(link)?.try_into()
        }
        _ => return Err(ProgramError::UnexpectedProgramType),
    })
}
