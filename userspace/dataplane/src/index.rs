//! The addresses that a map holds for each netns: a pod's own are found without reading everybody's.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use culvert_abi::Address;

/// Addresses by the cookie of their netns. One process at a time writes the map, so this stays true.
#[derive(Default)]
pub(crate) struct Index {
    addresses: Mutex<HashMap<u64, HashSet<Address>>>,
}

impl Index {
    pub(crate) fn add(&self, netns: u64, address: Address) {
        self.lock().entry(netns).or_default().insert(address);
    }

    pub(crate) fn remove(&self, netns: u64, address: Address) {
        let mut all = self.lock();
        if let Some(addresses) = all.get_mut(&netns) {
            addresses.remove(&address);
            if addresses.is_empty() {
                all.remove(&netns);
            }
        }
    }

    pub(crate) fn of(&self, netns: u64) -> HashSet<Address> {
        self.lock().get(&netns).cloned().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, HashSet<Address>>> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the map holds already, from an earlier process.
impl FromIterator<(u64, Address)> for Index {
    fn from_iter<T: IntoIterator<Item = (u64, Address)>>(entries: T) -> Self {
        let index = Self::default();
        entries.into_iter().for_each(|(netns, address)| index.add(netns, address));
        index
    }
}
