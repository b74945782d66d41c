//! `POD_ADDRESSES`, and whose an address is that several pods claim.
//!
//! CNI may give an address to a new sandbox while an old one that had it is still registered: it belongs to the one
//! registered last. Netns cookies do not tell which that is (each CPU counts its own, `gen_cookie_next`), and the
//! map holds the newest only, so the others are remembered here. An earlier process's are learnt again
//! when their pods are registered again, and those are older than what the map holds.

use std::collections::{HashMap, HashSet};

use aya::maps::{HashMap as BpfHash, MapData, MapError};
use culvert_abi::{Address, names};

use crate::{Error, maps::absent_is_none};

pub(crate) struct PodAddresses {
    map: BpfHash<MapData, Address, u64>,
    /// Cookies of the netns that claim an address; the last is the one in the map.
    claims: HashMap<Address, Vec<u64>>,
}

/// Whether a netns has been registered before: then others may have come after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    First,
    Repeated,
}

impl PodAddresses {
    pub(crate) fn take(map: BpfHash<MapData, Address, u64>) -> Result<Self, Error> {
        let claims = map.iter().map(|entry| entry.map(|(address, netns)| (address, vec![netns])));
        let claims = claims.collect::<Result<_, _>>().map_err(Error::map("read", names::POD_ADDRESSES))?;
        Ok(Self { map, claims })
    }

    /// From now on the netns claims these, and no others.
    pub(crate) fn set(&mut self, netns: u64, addresses: &[Address], claim: Claim) -> Result<(), Error> {
        self.release_others(netns, addresses)
            .and_then(|()| addresses.iter().try_for_each(|address| self.claim(netns, *address, claim)))
            .map_err(Error::map("write", names::POD_ADDRESSES))
    }

    fn claim(&mut self, netns: u64, address: Address, claim: Claim) -> Result<(), MapError> {
        let claims = self.claims.entry(address).or_default();
        if claims.contains(&netns) {
        } else if claim == Claim::First || claims.is_empty() {
            self.map.insert(address, netns, 0)?;
            claims.push(netns);
        } else {
            claims.insert(0, netns);
        }
        Ok(())
    }

    fn release_others(&mut self, netns: u64, kept: &[Address]) -> Result<(), MapError> {
        let kept: HashSet<_> = kept.iter().collect();
        let released = self.claims.iter_mut().filter(|(address, _)| !kept.contains(address));
        for (address, claims) in released.filter(|(_, claims)| claims.contains(&netns)) {
            let others = claims.iter().copied().filter(|other| *other != netns).collect::<Vec<_>>();
            match others.last() {
                Some(heir) => self.map.insert(address, heir, 0)?,
                None => absent_is_none(self.map.remove(address)).map(drop)?,
            }
            *claims = others;
        }
        self.claims.retain(|_, claims| !claims.is_empty());
        Ok(())
    }
}
