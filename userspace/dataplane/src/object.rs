//! The compiled programs, and a few instances of the pod object made ready ahead of their pods.

use std::{
    os::fd::{AsFd as _, BorrowedFd},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

use aya::{Ebpf, EbpfLoader, maps::Array, programs::SkLookup};
use aya_obj::Object;
use culvert_abi::names;

use crate::{
    Error,
    node::{missing_program, program_error},
    pins::Pins,
};

static NODE: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/node.o"));
static POD: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/pod.o"));

/// Instances kept ready: a burst of this many pods does not wait for the verifier.
const SPARES: usize = 16;

/// Shape of a map.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Its type (`enum bpf_map_type`).
    pub(crate) kind: u32,
    /// Bytes of a key.
    pub(crate) key: u32,
    /// Bytes of a value.
    pub(crate) value: u32,
    /// Capacity.
    pub(crate) entries: u32,
    /// Creation flags.
    pub(crate) flags: u32,
}

/// The shape that the node object gives a map.
pub(crate) fn expected_shape(map: &str) -> Result<Shape, Error> {
    let wrong = |reason| Error::Object { object: "node.o", reason };
    let parsed = Object::parse(NODE).map_err(|error| wrong(error.to_string()))?;
    let Some(definition) = parsed.maps.get(map) else { return Err(wrong(format!("it has no map {map}"))) };
    Ok(Shape {
        kind: definition.map_type(),
        key: definition.key_size(),
        value: definition.value_size(),
        entries: definition.max_entries(),
        flags: definition.map_flags(),
    })
}

/// Loads the node object for a host netns; its maps are shared through `pins`.
pub(crate) fn load_node(pins: &Pins, host_netns: u64) -> Result<Ebpf, Error> {
    if NODE.is_empty() || POD.is_empty() {
        return Err(Error::ObjectMissing);
    }
    loader(pins)
        .override_global(names::HOST_NETNS, &host_netns, true)
        .load(NODE)
        .map_err(load_error("node.o"))
}

/// One instance of the pod object, verified, attached to nothing yet.
pub(crate) struct PodProgram {
    object: Ebpf,
}

impl PodProgram {
    fn load(loader: &mut EbpfLoader<'_>) -> Result<Self, Error> {
        let mut program = Self { object: loader.load(POD).map_err(load_error("pod.o"))? };
        program.sk_lookup()?.load().map_err(program_error("load", names::SK_LOOKUP))?;
        Ok(program)
    }

    /// Makes it the instance of a netns.
    fn assign(&mut self, netns: u64) -> Result<(), Error> {
        let map = self.object.map_mut(names::POD_NETNS);
        let map =
            map.ok_or_else(|| Error::Object { object: "pod.o", reason: "it has no map POD_NETNS".into() })?;
        let mut map = Array::try_from(map).map_err(Error::map("open", names::POD_NETNS))?;
        map.set(0, netns, 0).map_err(Error::map("write", names::POD_NETNS))
    }

    /// The program.
    pub(crate) fn sk_lookup(&mut self) -> Result<&mut SkLookup, Error> {
        let program = self.object.program_mut(names::SK_LOOKUP);
        let program = program.ok_or_else(|| missing_program("pod.o", names::SK_LOOKUP))?;
        program.try_into().map_err(program_error("find", names::SK_LOOKUP))
    }

    /// Its descriptor.
    pub(crate) fn fd(&mut self) -> Result<BorrowedFd<'_>, Error> {
        Ok(self.sk_lookup()?.fd().map_err(program_error("find", names::SK_LOOKUP))?.as_fd())
    }
}

/// Hands out instances of the pod object. Verifying one takes the kernel about 2 ms, more than all the
/// rest of programming a pod, so a thread keeps some ready.
pub(crate) struct PodPrograms {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    /// `EbpfLoader::new` reads and parses the kernel's BTF, needed or not (17 ms): one for the life of the process.
    loader: Mutex<EbpfLoader<'static>>,
    spares: Mutex<Vec<PodProgram>>,
    /// How many callers wait for the loader.
    waiting: AtomicUsize,
    /// An instance was taken.
    taken: Condvar,
    stop: AtomicBool,
}

impl PodPrograms {
    pub(crate) fn start(pins: &Pins) -> Result<Self, Error> {
        let mut loader = loader(pins);
        // The first load is the slow one; it must not be a pod's.
        let first = PodProgram::load(&mut loader)?;
        let shared = Arc::new(Shared {
            loader: Mutex::new(loader),
            spares: Mutex::new(vec![first]),
            waiting: AtomicUsize::new(0),
            taken: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new().name("culvert-spares".into()).spawn(move || own.keep_ready());
        Ok(Self { shared, thread: Some(thread.map_err(Error::system("start a thread"))?) })
    }

    /// An instance for a netns.
    pub(crate) fn take(&self, netns: u64) -> Result<PodProgram, Error> {
        let spare = lock(&self.shared.spares).pop();
        let program = spare.map_or_else(|| self.shared.load_now(), Ok);
        self.shared.wake();
        let mut program = program?;
        program.assign(netns)?;
        Ok(program)
    }
}

impl Shared {
    /// Somebody waits, so the thread that works ahead stands back: the lock alone is not fair.
    fn load_now(&self) -> Result<PodProgram, Error> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut loader = lock(&self.loader);
        // Whoever held the loader may have made the one that is needed.
        let spare = lock(&self.spares).pop();
        let program = spare.map_or_else(|| PodProgram::load(&mut loader), Ok);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        program
    }

    fn keep_ready(&self) {
        while !self.stop.load(Ordering::SeqCst) {
            let spares = lock(&self.spares);
            if self.must_wait(spares.len()) {
                self.wait(spares);
                continue;
            }
            drop(spares);
            let mut loader = lock(&self.loader);
            match PodProgram::load(&mut loader) {
                Ok(program) => lock(&self.spares).push(program),
                Err(error) => {
                    drop(loader);
                    tracing::warn!(%error, "cannot make a pod program ahead of time; trying at the next pod");
                    self.wait(lock(&self.spares));
                }
            }
        }
    }

    fn must_wait(&self, spares: usize) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0 || spares >= SPARES
    }

    /// Sleeps until an instance is taken.
    fn wait(&self, spares: MutexGuard<'_, Vec<PodProgram>>) {
        if !self.stop.load(Ordering::SeqCst) {
            drop(self.taken.wait(spares));
        }
    }

    /// With the lock, so that nobody who has just decided to sleep misses it.
    fn wake(&self) {
        let spares = lock(&self.spares);
        self.taken.notify_all();
        drop(spares);
    }
}

impl Drop for PodPrograms {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap_or_default();
        }
    }
}

fn loader(pins: &Pins) -> EbpfLoader<'static> {
    let mut loader = EbpfLoader::new();
    // Nothing in the objects is relocated by the kernel's BTF, which takes 10 MiB and more.
    loader.btf(None);
    for map in names::MAPS {
        loader.map_pin_path(map, pins.map(map));
    }
    loader
}

fn load_error(object: &'static str) -> impl FnOnce(aya::EbpfError) -> Error {
    move |source| Error::Load { object, source: Box::new(source) }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use culvert_abi::{Address, Counters, FlowKey, ListenerKey, OwnAddress, PodEntry};

    use super::*;

    /// Bare `cargo test` works without BPF tools; where they are required their absence is a failure.
    fn object(bytes: &'static [u8]) -> Option<Object> {
        if bytes.is_empty() {
            assert!(option_env!("EBPF_OBJECTS_REQUIRED").is_none(), "built without the BPF objects");
            println!("skipped: built without the BPF objects, run `cargo xtask build-ebpf`");
            return None;
        }
        Some(Object::parse(bytes).unwrap())
    }

    #[test]
    fn maps_have_the_sizes_of_their_types() {
        let Some(node) = object(NODE) else { return };
        let sizes = [
            (names::PODS, size_of::<u64>(), size_of::<PodEntry>()),
            (names::OWN_ADDRESSES, size_of::<OwnAddress>(), size_of::<u32>()),
            (names::POD_ADDRESSES, size_of::<Address>(), size_of::<u64>()),
            (names::LISTENERS, size_of::<ListenerKey>(), size_of::<u64>()),
            (names::HOST_FLOWS, size_of::<FlowKey>(), size_of::<u64>()),
            (names::UNKNOWN_FLOWS, size_of::<FlowKey>(), size_of::<u32>()),
            (names::ZTUNNELS, size_of::<u32>(), size_of::<u64>()),
            (names::SOCKET_LABELS, size_of::<u32>(), size_of::<u32>()),
            (names::COUNTERS, size_of::<u64>(), size_of::<Counters>()),
        ];
        assert_eq!(sizes.map(|(name, ..)| name), names::MAPS);
        for (name, key, value) in sizes {
            let map = node.maps.get(name).unwrap_or_else(|| panic!("no map {name}"));
            assert_eq!((map.key_size() as usize, map.value_size() as usize), (key, value), "{name}");
        }
    }

    #[test]
    fn both_objects_agree_on_the_maps_they_share() {
        let (Some(node), Some(pod)) = (object(NODE), object(POD)) else { return };
        for (name, map) in pod.maps.iter().filter(|(name, _)| *name != names::POD_NETNS) {
            let other = node.maps.get(name).unwrap_or_else(|| panic!("only pod.o has map {name}"));
            let shape =
                |map: &aya_obj::Map| (map.map_type(), map.key_size(), map.value_size(), map.max_entries());
            assert_eq!(shape(map), shape(other), "{name}");
        }
    }

    #[test]
    fn every_program_has_its_name() {
        let (Some(node), Some(pod)) = (object(NODE), object(POD)) else { return };
        let on_cgroup = crate::node::CGROUP_PROGRAMS.map(|(name, _)| name);
        for name in on_cgroup.into_iter().chain([names::PROCESS_EXIT]) {
            assert!(node.programs.contains_key(name), "{name}");
        }
        assert!(pod.programs.contains_key(names::SK_LOOKUP));
    }
}
