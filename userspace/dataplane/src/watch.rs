//! Keeps each pod's routing and own addresses in step with its interfaces.
//!
//! One thread for all pods, woken by rtnetlink. It does not look at what changed: it reads the netns and
//! puts in what is missing, so lost or merged events do no harm.

use std::{
    collections::{HashMap, HashSet},
    io,
    os::fd::AsFd as _,
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use culvert_abi::Address;
use netlink_sys::protocols::NETLINK_ROUTE;
use nix::{
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        eventfd::EventFd,
    },
    time::{ClockId, clock_gettime},
};

use crate::{
    Error,
    maps::Maps,
    netlink::{Changes, Netlink},
    routing::{self, Interfaces},
};

/// Links; addresses, routes and rules of both families (RTMGRP_*, include/uapi/linux/rtnetlink.h;
/// RTNLGRP_IPV6_RULE has no such name).
const GROUPS: u32 = (libc::RTMGRP_LINK
    | libc::RTMGRP_IPV4_IFADDR
    | libc::RTMGRP_IPV4_ROUTE
    | libc::RTMGRP_IPV4_RULE
    | libc::RTMGRP_IPV6_IFADDR
    | libc::RTMGRP_IPV6_ROUTE) as u32
    | 1 << (19 - 1);

const SWEEP_INTERVAL: Duration = Duration::from_secs(2);
/// No netns cookie: the kernel counts them from 1.
const STOP: u64 = 0;

/// One netns under watch. Its sockets keep it alive.
pub(crate) struct Watched {
    cookie: u64,
    pub(crate) netlink: Netlink,
    changes: Changes,
    /// The thread may hold one that was removed meanwhile: it must not touch the netns any more.
    ended: bool,
}

impl Watched {
    /// Begins with the calling thread's netns, whose cookie this is.
    pub(crate) fn begin(cookie: u64) -> io::Result<Self> {
        let netlink = Netlink::open(NETLINK_ROUTE)?;
        let changes = Changes::subscribe(GROUPS, netlink.port())?;
        Ok(Self { cookie, netlink, changes, ended: false })
    }

    /// Brings routing and own addresses in step with what was found.
    pub(crate) fn sync(&mut self, maps: &Maps, found: &Interfaces) -> Result<(), Error> {
        self.sync_interfaces(maps, found)?;
        routing::ensure_rules(&mut self.netlink).map_err(Error::system("rtnetlink"))
    }

    /// Addresses are added before routes could need them and removed at once when they are gone.
    fn sync_interfaces(&mut self, maps: &Maps, found: &Interfaces) -> Result<(), Error> {
        let present: HashSet<Address> = found.addresses.iter().copied().map(Address::from).collect();
        let known = maps.own_addresses(self.cookie);
        for address in present.difference(&known) {
            maps.add_own_address(self.cookie, *address)?;
        }
        for address in known.difference(&present) {
            maps.remove_own_address(self.cookie, *address)?;
        }
        routing::ensure_routes(&mut self.netlink, &found.indexes).map_err(Error::system("rtnetlink"))
    }

    /// The rules first: without them a marked packet goes where an unmarked one would, so they come back
    /// before anything is looked at.
    fn follow(&mut self, maps: &Maps) -> Result<(), Error> {
        if self.ended || !self.changes.drain() {
            return Ok(());
        }
        routing::ensure_rules(&mut self.netlink).map_err(Error::system("rtnetlink"))?;
        let found = routing::interfaces(&mut self.netlink).map_err(Error::system("rtnetlink dump"))?;
        self.sync_interfaces(maps, &found)
    }
}

struct Shared {
    epoll: Epoll,
    pods: Mutex<HashMap<u64, Arc<Mutex<Watched>>>>,
}

/// The watching thread; it ends when this is dropped.
pub(crate) struct Watch {
    shared: Arc<Shared>,
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(crate) fn start(maps: Arc<Maps>) -> Result<Self, Error> {
        let failed = |call| move |errno: nix::Error| Error::System { call, source: errno.into() };
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed("epoll_create1"))?;
        let stop = EventFd::new().map_err(failed("eventfd"))?;
        epoll.add(&stop, EpollEvent::new(EpollFlags::EPOLLIN, STOP)).map_err(failed("epoll_ctl"))?;
        let shared = Arc::new(Shared { epoll, pods: Mutex::default() });
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("culvert-watch".into())
            .spawn(move || run(&own, &maps))
            .map_err(Error::system("start the watching thread"))?;
        Ok(Self { shared, stop, thread: Some(thread) })
    }

    /// Whether the netns is watched: then it lives, by our sockets in it if by nothing else.
    pub(crate) fn holds(&self, cookie: u64) -> bool {
        lock(&self.shared.pods).contains_key(&cookie)
    }

    /// Watches a netns, in place of what was watched under its cookie.
    pub(crate) fn add(&self, watched: Watched) -> Result<(), Error> {
        let cookie = watched.cookie;
        self.remove(cookie);
        let event = EpollEvent::new(EpollFlags::EPOLLIN, cookie);
        self.shared
            .epoll
            .add(watched.changes.as_fd(), event)
            .map_err(|errno| Error::System { call: "epoll_ctl", source: errno.into() })?;
        lock(&self.shared.pods).insert(cookie, Arc::new(Mutex::new(watched)));
        Ok(())
    }

    /// Ends the watch of a netns and waits for a step that is under way.
    pub(crate) fn remove(&self, cookie: u64) {
        let Some(watched) = lock(&self.shared.pods).remove(&cookie) else {
            return;
        };
        let mut watched = lock(&watched);
        watched.ended = true;
        // Closing the socket would do the same; an error means that it is gone already.
        self.shared.epoll.delete(watched.changes.as_fd()).unwrap_or_default();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Err(error) = self.stop.write(1) {
            tracing::warn!(%error, "could not stop the watching thread");
        } else if let Some(thread) = self.thread.take() {
            thread.join().unwrap_or_default();
        }
    }
}

fn run(shared: &Shared, maps: &Maps) {
    let mut next_sweep = Instant::now() + SWEEP_INTERVAL;
    let mut events = [EpollEvent::empty(); 32];
    loop {
        let wait = next_sweep.saturating_duration_since(Instant::now()).as_millis().min(60_000) as u16;
        let ready = shared.epoll.wait(&mut events, EpollTimeout::from(wait)).unwrap_or(0);
        for event in events.get(..ready).unwrap_or_default() {
            if event.data() == STOP {
                return;
            }
            let watched = lock(&shared.pods).get(&event.data()).cloned();
            if let Some(watched) = watched
                && let Err(error) = lock(&watched).follow(maps)
            {
                tracing::error!(netns = event.data(), %error, source = ?std::error::Error::source(&error), "cannot bring a pod's routing in step");
            }
        }
        if Instant::now() >= next_sweep {
            if let Err(error) = monotonic_ns().and_then(|now| maps.sweep_flows(now)) {
                tracing::error!(%error, "cannot sweep host flows");
            }
            next_sweep = Instant::now() + SWEEP_INTERVAL;
        }
    }
}

fn monotonic_ns() -> Result<u64, Error> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map_err(|errno| Error::System { call: "clock_gettime", source: errno.into() })?;
    Ok(now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
