//! The dataplane as enrollment sees it. Every method may block for milliseconds.

use std::{net::IpAddr, os::fd::AsFd, path::Path, time::Duration};

use culvert_dataplane::{Dataplane, Error, Netns, Options, Restored};

use crate::self_test;

/// Takes a netns into redirection and out of it, as [`culvert_dataplane`] documents it.
pub trait Redirect: Send + Sync + 'static {
    /// An open network namespace.
    type Netns: AsFd + Send + Sync + 'static;

    /// Opens the namespace at a path of this process's view.
    fn open(&self, path: &Path) -> Result<Self::Netns, Error>;
    /// The kernel's identity of the namespace.
    fn cookie(netns: &Self::Netns) -> u64;
    /// The addresses that its interfaces have, loopback and link-local ones left out.
    fn addresses(&self, netns: &Self::Netns) -> Result<Vec<IpAddr>, Error>;
    /// Routing, sysctls, own addresses.
    fn register(&self, netns: &Self::Netns, addresses: &[IpAddr], options: Options) -> Result<(), Error>;
    /// ztunnel listens as capture needs it.
    fn check_listeners(&self, netns: &Self::Netns) -> Result<(), Error>;
    /// Starts capture.
    fn activate(&self, netns: &Self::Netns) -> Result<(), Error>;
    /// Whether it is captured, by whoever began it.
    fn is_active(&self, netns: &Self::Netns) -> Result<bool, Error>;
    /// Proves capture by a connection of each family, each within `patience`.
    fn self_test(
        &self,
        netns: &Self::Netns,
        addresses: &[IpAddr],
        patience: Duration,
    ) -> Result<(), self_test::Error>;
    /// Ends capture.
    fn withdraw(&self, netns: &Self::Netns) -> Result<(), Error>;
    /// Puts the netns back as it was.
    fn restore(&self, netns: &Self::Netns) -> Result<Restored, Error>;
    /// Removes all that was kept for a netns that is gone.
    fn forget(&self, cookie: u64) -> Result<(), Error>;
    /// Goes on with a netns that an earlier process registered.
    fn resume(&self, netns: &Self::Netns, addresses: &[IpAddr]) -> Result<(), Error>;
    /// Removes what is left of netns that are gone.
    fn collect(&self) -> Result<Vec<u64>, Error>;
}

impl Redirect for Dataplane {
    type Netns = Netns;

    fn open(&self, path: &Path) -> Result<Netns, Error> {
        Netns::open(path)
    }

    fn cookie(netns: &Netns) -> u64 {
        netns.cookie()
    }

    fn addresses(&self, netns: &Netns) -> Result<Vec<IpAddr>, Error> {
        netns
            .run(interface_addresses)?
            .map_err(|errno| Error::System { call: "getifaddrs", source: errno.into() })
    }

    fn register(&self, netns: &Netns, addresses: &[IpAddr], options: Options) -> Result<(), Error> {
        Self::register(self, netns, addresses, options)
    }

    fn check_listeners(&self, netns: &Netns) -> Result<(), Error> {
        Self::check_listeners(self, netns)
    }

    fn activate(&self, netns: &Netns) -> Result<(), Error> {
        Self::activate(self, netns)
    }

    fn is_active(&self, netns: &Netns) -> Result<bool, Error> {
        Self::is_active(self, netns)
    }

    fn self_test(
        &self,
        netns: &Netns,
        addresses: &[IpAddr],
        patience: Duration,
    ) -> Result<(), self_test::Error> {
        self_test::run(self, netns, addresses, patience)
    }

    fn withdraw(&self, netns: &Netns) -> Result<(), Error> {
        Self::withdraw(self, netns)
    }

    fn restore(&self, netns: &Netns) -> Result<Restored, Error> {
        Self::restore(self, netns)
    }

    fn forget(&self, cookie: u64) -> Result<(), Error> {
        Self::forget(self, cookie)
    }

    fn resume(&self, netns: &Netns, addresses: &[IpAddr]) -> Result<(), Error> {
        Self::resume(self, netns, addresses)
    }

    fn collect(&self) -> Result<Vec<u64>, Error> {
        Self::collect(self)
    }
}

/// Of the calling thread's netns.
fn interface_addresses() -> nix::Result<Vec<IpAddr>> {
    let addresses = nix::ifaddrs::getifaddrs()?.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
    });
    Ok(addresses.filter(is_reachable).collect())
}

/// Whether others can have a connection with it.
fn is_reachable(address: &IpAddr) -> bool {
    !address.is_loopback()
        && match address {
            IpAddr::V4(address) => !address.is_link_local(),
            IpAddr::V6(address) => !address.is_unicast_link_local(),
        }
}
