//! The way of one pod's netns into redirection and out of it.

use std::{io, net::IpAddr, os::fd::AsFd as _};

use aya::programs::links::FdLink;
use culvert_abi::{
    PodEntry, names,
    pod::{ACTIVE, BYPASS_INBOUND, DRAINING, INTRODUCTION, REGISTERED},
};
use netlink_sys::protocols::NETLINK_ROUTE;

use crate::{
    Dataplane, Error, Netns, bpf, guard,
    netlink::Netlink,
    node::{pin_link, program_error},
    pins::unpin,
    pod_addresses::Claim,
    routing::{self, PacketSizes},
    sockets,
    sysctl::{self, Sysctls},
    watch::Watched,
};

/// What a pod may ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Inbound connections reach the pod directly (`ambient.istio.io/bypass-inbound-capture`).
    pub bypass_inbound: bool,
}

/// How far [`Dataplane::restore`] came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restored {
    /// The netns is as it was before registration.
    Complete,
    /// This many captured connections are open; their routing stays until they have closed. Call again.
    Draining(usize),
}

impl Dataplane {
    /// Prepares a netns: its program, routing, sysctls, own addresses. ztunnel's listeners are stored from
    /// now on and its ports are reserved; everything else passes. Repeating it takes over new addresses and
    /// options. On error nothing is left behind.
    ///
    /// `addresses` are those that CNI and the API server report for the pod.
    ///
    /// # Errors
    /// [`Error::HostNetns`] for the host's own netns, whatever the caller says.
    pub fn register(&self, netns: &Netns, addresses: &[IpAddr], options: Options) -> Result<(), Error> {
        let cookie = netns.cookie();
        if cookie == self.host_netns {
            return Err(Error::HostNetns { cookie });
        }
        let known = self.maps.pod(cookie)?;
        let result = self.prepare(netns, addresses, options, known);
        if result.is_err() && known.is_none() {
            // The first error is what the caller needs; this one would only repeat it.
            if let Err(error) = self.undo(netns) {
                tracing::warn!(netns = cookie, %error, "could not take back a registration that failed");
            }
        }
        result
    }

    fn prepare(
        &self,
        netns: &Netns,
        addresses: &[IpAddr],
        options: Options,
        known: Option<PodEntry>,
    ) -> Result<(), Error> {
        let cookie = netns.cookie();
        let failed = |action: &str| {
            let action = action.to_owned();
            move |source: io::Error| Error::Routing { action, cookie, source }
        };
        // The pin first: whatever a process that is killed leaves in the maps, the next one finds by it.
        self.attach(netns)?;
        self.maps.start_counting(cookie)?;
        let claim = if known.is_some() { Claim::Repeated } else { Claim::First };
        self.maps.set_pod_addresses(cookie, addresses, claim)?;
        let flags = if options.bypass_inbound { BYPASS_INBOUND } else { 0 };
        let (maps, proc, big_tcp) = (&self.maps, &self.config.proc, self.config.big_tcp);
        let watched = netns.run(|| -> Result<Watched, Error> {
            let mut watched = Watched::begin(cookie).map_err(failed("watch interfaces and routes"))?;
            let netlink = &mut watched.netlink;
            let found = routing::interfaces(netlink).map_err(failed("list interfaces"))?;
            let sysctls = Sysctls::open(proc).map_err(failed("write sysctls"))?;
            let entry = match known {
                Some(known) if known.state == ACTIVE => PodEntry { flags, ..known },
                Some(known) => PodEntry { state: REGISTERED, flags, ..known },
                None => {
                    let sizes = if big_tcp { found.loopback } else { PacketSizes::default() };
                    new_entry(flags, sysctls.bits(), sizes)
                }
            };
            // What was there before is recorded before anything is changed.
            maps.set_pod(cookie, entry)?;
            sysctls.write(sysctl::ALL_ON).map_err(failed("write sysctls"))?;
            guard::ensure().map_err(failed("add XFRM policies (is the kernel module xfrm_user missing?)"))?;
            routing::set_packet_sizes(netlink, saved_sizes(&entry).enlarged())
                .map_err(failed("set the packet sizes of lo"))?;
            watched.sync(maps, &found).map_err(|error| match error {
                Error::System { source, .. } => failed("add routes and rules")(source),
                other => other,
            })?;
            Ok(watched)
        })??;
        self.watch.add(watched)
    }

    /// Gives the netns its program, pinned, which passes everything until the pod is active. One that somebody
    /// detached (`bpftool link detach`) is attached anew.
    fn attach(&self, netns: &Netns) -> Result<(), Error> {
        let pin = self.pins.pod(netns.cookie());
        if pin.exists() {
            let link = bpf::open_link(&pin).map_err(Error::path("open pinned link", &pin))?;
            if bpf::netns_inode(link.as_fd()).map_err(Error::path("read pinned link", &pin))? != 0 {
                return Ok(());
            }
            unpin(&pin)?;
        }
        let mut program = self.programs.take(netns.cookie())?;
        let program = program.sk_lookup()?;
        let link = program.attach(netns).map_err(program_error("attach", names::SK_LOOKUP))?;
        let link: FdLink = program.take_link(link).map_err(program_error("keep", names::SK_LOOKUP))?.into();
        pin_link(link, &pin)
    }

    /// Starts capture with one write.
    ///
    /// # Errors
    /// [`Error::NotRegistered`] before [`Dataplane::register`].
    pub fn activate(&self, netns: &Netns) -> Result<(), Error> {
        let cookie = netns.cookie();
        match self.maps.pod(cookie)? {
            Some(entry) if matches!(entry.state, REGISTERED | ACTIVE) => {
                self.maps.set_pod(cookie, PodEntry { state: ACTIVE, ..entry })
            }
            _ => Err(Error::NotRegistered { cookie }),
        }
    }

    /// Whether the netns is captured, by whoever activated it.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn is_active(&self, netns: &Netns) -> Result<bool, Error> {
        Ok(self.maps.pod(netns.cookie())?.is_some_and(|entry| entry.state == ACTIVE))
    }

    /// Ends capture: connections that exist go on, new ones are not touched. Follow with ZDS and
    /// [`Dataplane::restore`]. A netns that is not registered is no error.
    ///
    /// The pod's program stays until then: a captured SYN that is under way is still ztunnel's, and without the
    /// program a listener of the workload on that port could take it.
    ///
    /// # Errors
    /// When a map or pin cannot be written.
    pub fn withdraw(&self, netns: &Netns) -> Result<(), Error> {
        let cookie = netns.cookie();
        let Some(entry) = self.maps.pod(cookie)? else {
            return Ok(());
        };
        self.maps.set_pod(cookie, PodEntry { state: DRAINING, ..entry })?;
        self.maps.set_pod_addresses(cookie, &[], Claim::Repeated)
    }

    /// Puts the netns back as it was, once no captured connection is open any more. A socket in
    /// TIME_WAIT is none: it sends nothing unless its peer, on the same `lo`, repeats a FIN.
    ///
    /// # Errors
    /// When the netns cannot be entered or changed; it stays as it is and can be tried again.
    pub fn restore(&self, netns: &Netns) -> Result<Restored, Error> {
        let cookie = netns.cookie();
        let Some(entry) = self.maps.pod(cookie)? else {
            // A process that was killed while it registered the netns may have begun with the other maps.
            self.forget(cookie)?;
            return Ok(Restored::Complete);
        };
        if entry.state == INTRODUCTION || entry.state == ACTIVE {
            return Err(Error::NotRegistered { cookie });
        }
        let open = netns.run(sockets::count_marked)?.map_err(Error::system("sock_diag"))?;
        if open > 0 {
            return Ok(Restored::Draining(open));
        }
        self.undo(netns)?;
        Ok(Restored::Complete)
    }

    /// [`Dataplane::withdraw`] and [`Dataplane::restore`] in one.
    ///
    /// # Errors
    /// As those.
    pub fn detach(&self, netns: &Netns) -> Result<Restored, Error> {
        self.withdraw(netns)?;
        self.restore(netns)
    }

    /// Removes all that was kept for a netns, without entering it: it is gone, or about to be.
    ///
    /// # Errors
    /// When a map or pin cannot be written.
    pub fn forget(&self, cookie: u64) -> Result<(), Error> {
        self.maps.remove_pod(cookie)?;
        self.watch.remove(cookie);
        self.maps.set_pod_addresses(cookie, &[], Claim::Repeated)?;
        for address in self.maps.own_addresses(cookie) {
            self.maps.remove_own_address(cookie, address)?;
        }
        self.maps.stop_counting(cookie)?;
        self.detach_program(cookie)
    }

    /// The last of what is kept for a netns.
    fn detach_program(&self, cookie: u64) -> Result<(), Error> {
        let pin = self.pins.pod(cookie);
        match bpf::open_link(&pin) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            // Unpinning ends it too, a moment later.
            link => {
                link.and_then(|link| bpf::detach_link(link.as_fd()))
                    .map_err(Error::path("detach pinned link", &pin))?;
            }
        }
        unpin(&pin)
    }

    /// Watches a netns that an earlier process registered, and brings it in step at once.
    ///
    /// # Errors
    /// [`Error::NotRegistered`] if none did, or not to the end: it is not captured.
    pub fn resume(&self, netns: &Netns, addresses: &[IpAddr]) -> Result<(), Error> {
        let cookie = netns.cookie();
        let Some(entry) = self.maps.pod(cookie)? else {
            return Err(Error::NotRegistered { cookie });
        };
        let options = Options { bypass_inbound: entry.flags & BYPASS_INBOUND != 0 };
        match entry.state {
            DRAINING => return Ok(()),
            REGISTERED => return Err(Error::NotRegistered { cookie }),
            _ => {}
        }
        self.register(netns, addresses, options)
    }

    fn undo(&self, netns: &Netns) -> Result<(), Error> {
        let cookie = netns.cookie();
        if let Some(entry) = self.maps.pod(cookie)? {
            self.watch.remove(cookie);
            let proc = &self.config.proc;
            netns
                .run(|| -> io::Result<()> {
                    let mut netlink = Netlink::open(NETLINK_ROUTE)?;
                    let found = routing::interfaces(&mut netlink)?;
                    routing::restore(&mut netlink, &found.indexes)?;
                    guard::remove()?;
                    routing::set_packet_sizes(&mut netlink, saved_sizes(&entry))?;
                    Sysctls::open(proc)?.write(entry.saved_sysctls)
                })?
                .map_err(|source| Error::Routing { action: "restore routing".into(), cookie, source })?;
        }
        self.forget(cookie)
    }
}

const fn new_entry(flags: u32, saved_sysctls: u32, sizes: PacketSizes) -> PodEntry {
    PodEntry {
        state: REGISTERED,
        flags,
        saved_sysctls,
        saved_gso_max_size: sizes.gso,
        saved_gro_max_size: sizes.gro,
        saved_gso_ipv4_max_size: sizes.gso_ipv4,
        saved_gro_ipv4_max_size: sizes.gro_ipv4,
    }
}

const fn saved_sizes(entry: &PodEntry) -> PacketSizes {
    PacketSizes {
        gso: entry.saved_gso_max_size,
        gro: entry.saved_gro_max_size,
        gso_ipv4: entry.saved_gso_ipv4_max_size,
        gro_ipv4: entry.saved_gro_ipv4_max_size,
    }
}
