//! The pinned maps, with types.

use std::{
    collections::HashSet,
    net::IpAddr,
    os::fd::AsFd as _,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use aya::{
    Ebpf,
    maps::{HashMap, Map, MapData, MapError, PerCpuHashMap, PerCpuValues},
    util::nr_cpus,
};
use culvert_abi::{
    Address, Counters, FlowKey, ListenerKey, OwnAddress, PodEntry, flow::LIFETIME_NS, listener::SLOTS, names,
    pod::INTRODUCTION,
};

use crate::{
    Error, bpf,
    index::Index,
    pod_addresses::{Claim, PodAddresses},
};

type Hash<K, V> = Mutex<HashMap<MapData, K, V>>;

/// Every shared map. Each operation is one system call; the locks only serve aya's `&mut`.
pub(crate) struct Maps {
    pods: Hash<u64, PodEntry>,
    own_addresses: Hash<OwnAddress, u32>,
    pod_addresses: Mutex<PodAddresses>,
    host_flows: Hash<FlowKey, u64>,
    ztunnels: Hash<u32, u64>,
    counters: Mutex<PerCpuHashMap<MapData, u64, Counters>>,
    listeners: MapData,
    /// Keys of `own_addresses`.
    own_index: Index,
}

impl Maps {
    /// Takes the maps out of the loaded node object.
    pub(crate) fn take(node: &mut Ebpf) -> Result<Self, Error> {
        let counters = PerCpuHashMap::try_from(take(node, names::COUNTERS)?);
        let Map::SockHash(listeners) = take(node, names::LISTENERS)? else {
            return Err(Error::Object { object: "node.o", reason: "LISTENERS is no SOCKHASH".into() });
        };
        let own_addresses: Hash<OwnAddress, u32> = hash(node, names::OWN_ADDRESSES)?;
        let own: Result<Index, _> =
            lock(&own_addresses).keys().map(|key| key.map(|key| (key.netns, key.address))).collect();
        let maps = Self {
            own_index: own.map_err(Error::map("read", names::OWN_ADDRESSES))?,
            pods: hash(node, names::PODS)?,
            own_addresses,
            pod_addresses: Mutex::new(PodAddresses::take(open(node, names::POD_ADDRESSES)?)?),
            host_flows: hash(node, names::HOST_FLOWS)?,
            ztunnels: hash(node, names::ZTUNNELS)?,
            counters: Mutex::new(counters.map_err(Error::map("open", names::COUNTERS))?),
            listeners,
        };
        maps.start_counting(0)?;
        Ok(maps)
    }

    pub(crate) fn pod(&self, netns: u64) -> Result<Option<PodEntry>, Error> {
        absent_is_none(lock(&self.pods).get(&netns, 0)).map_err(Error::map("read", names::PODS))
    }

    pub(crate) fn set_pod(&self, netns: u64, entry: PodEntry) -> Result<(), Error> {
        lock(&self.pods).insert(netns, entry, 0).map_err(Error::map("write", names::PODS))
    }

    pub(crate) fn remove_pod(&self, netns: u64) -> Result<(), Error> {
        absent_is_none(lock(&self.pods).remove(&netns)).map_err(Error::map("write", names::PODS)).map(drop)
    }

    /// The netns that are introductions.
    pub(crate) fn introductions(&self) -> Result<Vec<u64>, Error> {
        let pods = lock(&self.pods).iter().collect::<Result<Vec<(u64, PodEntry)>, _>>();
        let pods = pods.map_err(Error::map("read", names::PODS))?;
        Ok(pods
            .into_iter()
            .filter(|(_, entry)| entry.state == INTRODUCTION)
            .map(|(netns, _)| netns)
            .collect())
    }

    pub(crate) fn add_own_address(&self, netns: u64, address: Address) -> Result<(), Error> {
        let key = OwnAddress { netns, address };
        lock(&self.own_addresses).insert(key, 1, 0).map_err(Error::map("write", names::OWN_ADDRESSES))?;
        self.own_index.add(netns, address);
        Ok(())
    }

    pub(crate) fn remove_own_address(&self, netns: u64, address: Address) -> Result<(), Error> {
        let key = OwnAddress { netns, address };
        absent_is_none(lock(&self.own_addresses).remove(&key))
            .map_err(Error::map("write", names::OWN_ADDRESSES))?;
        self.own_index.remove(netns, address);
        Ok(())
    }

    pub(crate) fn own_addresses(&self, netns: u64) -> HashSet<Address> {
        self.own_index.of(netns)
    }

    /// The addresses that CNI and the API server report for a pod.
    pub(crate) fn set_pod_addresses(
        &self,
        netns: u64,
        addresses: &[IpAddr],
        claim: Claim,
    ) -> Result<(), Error> {
        let addresses: Vec<Address> = addresses.iter().map(|address| (*address).into()).collect();
        lock(&self.pod_addresses).set(netns, &addresses, claim)
    }

    /// Cookies (SO_COOKIE) of ztunnel's sockets stored for a port.
    pub(crate) fn listeners(&self, netns: u64, port: u16, family: u16) -> Result<Vec<u64>, Error> {
        let mut cookies = Vec::new();
        for slot in 0..SLOTS {
            let key = ListenerKey { netns, port, family, slot };
            let cookie = bpf::listener_cookie(self.listeners.fd().as_fd(), &key);
            cookies.extend(cookie.map_err(Error::system("bpf(BPF_MAP_LOOKUP_ELEM) on LISTENERS"))?);
        }
        Ok(cookies)
    }

    pub(crate) fn ztunnels(&self) -> Result<Vec<(u32, u64)>, Error> {
        lock(&self.ztunnels).iter().collect::<Result<_, _>>().map_err(Error::map("read", names::ZTUNNELS))
    }

    /// Removes flows that count no longer; `now` in nanoseconds of CLOCK_MONOTONIC.
    pub(crate) fn sweep_flows(&self, now: u64) -> Result<(), Error> {
        let mut map = lock(&self.host_flows);
        let flows =
            map.iter().collect::<Result<Vec<_>, _>>().map_err(Error::map("read", names::HOST_FLOWS))?;
        for (flow, since) in flows {
            if now.saturating_sub(since) >= LIFETIME_NS {
                absent_is_none(map.remove(&flow)).map_err(Error::map("write", names::HOST_FLOWS))?;
            }
        }
        Ok(())
    }

    /// Gives a netns counters of its own; those it has are kept.
    ///
    /// Per-CPU memory comes from a small reserve that the kernel fills up a moment after it was used: in
    /// a burst of pods it may be empty just now.
    pub(crate) fn start_counting(&self, netns: u64) -> Result<(), Error> {
        const BPF_NOEXIST: u64 = 1;
        const PATIENCE: Duration = Duration::from_millis(100);
        let cpus = nr_cpus().map_err(|(path, error)| Error::path("read", path)(error))?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let zero = PerCpuValues::try_from(vec![Counters::default(); cpus])
                .map_err(Error::system("per-CPU values"))?;
            let result = lock(&self.counters).insert(netns, zero, BPF_NOEXIST);
            match result {
                Err(error) if errno(&error) == Some(libc::EEXIST) => return Ok(()),
                Err(error) if errno(&error) == Some(libc::ENOMEM) && Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(1));
                }
                result => return result.map_err(Error::map("write", names::COUNTERS)),
            }
        }
    }

    pub(crate) fn stop_counting(&self, netns: u64) -> Result<(), Error> {
        absent_is_none(lock(&self.counters).remove(&netns))
            .map_err(Error::map("write", names::COUNTERS))
            .map(drop)
    }

    pub(crate) fn counters(&self, netns: u64) -> Result<Counters, Error> {
        let values = absent_is_none(lock(&self.counters).get(&netns, 0));
        let mut sum = Counters::default();
        if let Some(values) = values.map_err(Error::map("read", names::COUNTERS))? {
            values.iter().for_each(|value| sum.add(value));
        }
        Ok(sum)
    }
}

fn take(node: &mut Ebpf, name: &'static str) -> Result<Map, Error> {
    node.take_map(name)
        .ok_or_else(|| Error::Object { object: "node.o", reason: format!("it has no map {name}") })
}

fn hash<K: aya::Pod, V: aya::Pod>(node: &mut Ebpf, name: &'static str) -> Result<Hash<K, V>, Error> {
    open(node, name).map(Mutex::new)
}

fn open<K: aya::Pod, V: aya::Pod>(
    node: &mut Ebpf,
    name: &'static str,
) -> Result<HashMap<MapData, K, V>, Error> {
    HashMap::try_from(take(node, name)?).map_err(Error::map("open", name))
}

/// A panic elsewhere leaves no half-written state here: each operation is one system call.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn absent_is_none<T>(result: Result<T, MapError>) -> Result<Option<T>, MapError> {
    match result {
        Err(MapError::KeyNotFound) => Ok(None),
        Err(error) if errno(&error) == Some(libc::ENOENT) => Ok(None),
        other => other.map(Some),
    }
}

fn errno(error: &MapError) -> Option<i32> {
    match error {
        MapError::SyscallError(error) => error.io_error.raw_os_error(),
        _ => None,
    }
}
