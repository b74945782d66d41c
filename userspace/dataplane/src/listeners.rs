//! Whether ztunnel listens in a pod as capture needs it.

use culvert_abi::{
    listener::DUAL_STACK,
    ztunnel::{DNS_PORT, HBONE_PORT, INBOUND_PORT, OUTBOUND_PORT, is_reserved},
};

use crate::{Dataplane, Error, Netns, sockets};

impl Dataplane {
    /// To be called between ztunnel's acknowledgement and [`Dataplane::activate`], and after a refusal:
    /// a foreign listener that shares its port with nobody makes ztunnel's `bind()` fail, and ztunnel
    /// does not name the port.
    ///
    /// # Errors
    /// - [`Error::ForeignListener`]: somebody else had one of ztunnel's ports before registration;
    /// - [`Error::NoListener`]: ztunnel has not opened one of its three ports;
    /// - [`Error::NotTransparent`]: the listener could not answer for a foreign address. ztunnel sets
    ///   the option after `listen()`, so no hook sees it (`src/proxy.rs`, `maybe_set_transparent`).
    pub fn check_listeners(&self, netns: &Netns) -> Result<(), Error> {
        const PORTS: [u16; 3] = [OUTBOUND_PORT, INBOUND_PORT, HBONE_PORT];
        let cookie = netns.cookie();
        let listening = netns.run(sockets::listening)?.map_err(Error::system("sock_diag"))?;
        let mut known = Vec::new();
        for port in PORTS {
            known.extend(self.maps.listeners(cookie, port, DUAL_STACK)?);
        }
        for family in [libc::AF_INET, libc::AF_INET6] {
            known.extend(self.maps.listeners(cookie, DNS_PORT, family as u16)?);
        }
        let reserved = || listening.iter().filter(|socket| is_reserved(socket.port));
        if let Some(foreign) = reserved().find(|socket| !known.contains(&socket.cookie)) {
            return Err(Error::ForeignListener { address: foreign.address, port: foreign.port, cookie });
        }
        for port in PORTS {
            self.check_listener(netns, port)?;
        }
        match reserved().find(|socket| socket.port != DNS_PORT && !socket.is_transparent) {
            Some(opaque) => Err(Error::NotTransparent { port: opaque.port, cookie }),
            None => Ok(()),
        }
    }

    /// The cookies of ztunnel's sockets that are stored for a port, at least one.
    pub(crate) fn check_listener(&self, netns: &Netns, port: u16) -> Result<Vec<u64>, Error> {
        let cookie = netns.cookie();
        let stored = self.maps.listeners(cookie, port, DUAL_STACK)?;
        if stored.is_empty() { Err(Error::NoListener { port, cookie }) } else { Ok(stored) }
    }
}
