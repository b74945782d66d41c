//! What the agent knows of sandboxes: data only, never held across a wait.

use std::collections::{HashMap, VecDeque};

use tokio_util::sync::CancellationToken;

use super::{attachment::Attachment, sandbox::Sandbox};

/// A sandbox and how it stands.
#[derive(Debug)]
pub(super) struct Entry<N> {
    pub(super) sandbox: Sandbox<N>,
    pub(super) state: State,
    /// Number of its last successful ADD: the greatest of a pod is current.
    pub(super) number: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// In the mesh.
    Enrolled,
    /// On its way out: captured connections are still open, or something failed. Tried again.
    Leaving,
}

/// An ADD under way.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) uid: String,
    pub(super) attachment: Attachment,
    pub(super) cancel: CancellationToken,
}

/// Every sandbox, and every ADD under way.
#[derive(Debug)]
pub(super) struct Table<N> {
    entries: HashMap<u64, Entry<N>>,
    pending: HashMap<u64, Pending>,
    numbers: u64,
    /// Cookies of sandboxes that the runtime has removed, the newest last. A cookie is never used again.
    removed: VecDeque<u64>,
}

/// How many removed sandboxes are remembered: their processes end within moments.
const REMOVED: usize = 1024;

impl<N> Default for Table<N> {
    fn default() -> Self {
        Self { entries: HashMap::new(), pending: HashMap::new(), numbers: 0, removed: VecDeque::new() }
    }
}

impl<N> Table<N> {
    fn next_number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Enters an ADD; the number leaves it.
    pub(super) fn begin(&mut self, pending: Pending) -> u64 {
        let number = self.next_number();
        self.pending.insert(number, pending);
        number
    }

    pub(super) fn end(&mut self, number: u64) {
        self.pending.remove(&number);
    }

    /// Cancels what is under way for attachments that `named` covers; whose they are.
    pub(super) fn cancel(&self, named: &Attachment) -> Vec<String> {
        let covered = self.pending.values().filter(|pending| named.covers(&pending.attachment));
        covered
            .map(|pending| {
                pending.cancel.cancel();
                pending.uid.clone()
            })
            .collect()
    }

    /// The sandbox is in the mesh, and the current one of its pod.
    pub(super) fn enroll(&mut self, sandbox: Sandbox<N>) {
        let number = self.next_number();
        self.entries.insert(sandbox.cookie, Entry { sandbox, state: State::Enrolled, number });
    }

    /// The sandbox is on its way out.
    pub(super) fn leave(&mut self, sandbox: Sandbox<N>) {
        let number = self.entries.get(&sandbox.cookie).map_or(0, |entry| entry.number);
        self.entries.insert(sandbox.cookie, Entry { sandbox, state: State::Leaving, number });
    }

    pub(super) fn remove(&mut self, cookie: u64) {
        self.entries.remove(&cookie);
    }

    /// A sandbox in the mesh.
    pub(super) fn enrolled(&self, cookie: u64) -> Option<&Sandbox<N>> {
        self.in_state(State::Enrolled).find(|sandbox| sandbox.cookie == cookie)
    }

    pub(super) fn in_state(&self, state: State) -> impl Iterator<Item = &Sandbox<N>> {
        self.entries.values().filter(move |entry| entry.state == state).map(|entry| &entry.sandbox)
    }

    /// The sandbox that ztunnel is to serve under a pod's uid.
    pub(super) fn current(&self, uid: &str) -> Option<&Sandbox<N>> {
        let own = self
            .entries
            .values()
            .filter(|entry| entry.state == State::Enrolled && entry.sandbox.pod.uid == uid);
        own.max_by_key(|entry| entry.number).map(|entry| &entry.sandbox)
    }

    /// Sandboxes in the mesh with an attachment that `named` covers.
    pub(super) fn covered(&self, named: &Attachment) -> impl Iterator<Item = &Sandbox<N>> {
        self.in_state(State::Enrolled)
            .filter(|sandbox| sandbox.attachments.iter().any(|attachment| named.covers(attachment)))
    }

    /// Whether an ADD of the pod is under way.
    pub(super) fn is_pending(&self, uid: &str) -> bool {
        self.pending.values().any(|pending| pending.uid == uid)
    }

    /// The runtime has removed the sandbox.
    pub(super) fn set_removed(&mut self, cookie: u64) {
        if self.removed.len() == REMOVED {
            self.removed.pop_front();
        }
        self.removed.push_back(cookie);
    }

    /// Whether the runtime has removed the sandbox.
    pub(super) fn is_removed(&self, cookie: u64) -> bool {
        self.removed.contains(&cookie)
    }

    /// Takes the covered attachments off a sandbox. If none is left, the sandbox has to leave.
    pub(super) fn detach(&mut self, cookie: u64, named: &Attachment) -> Detached<N> {
        let Some(entry) = self.entries.get_mut(&cookie).filter(|entry| entry.state == State::Enrolled) else {
            return Detached::Nothing;
        };
        let before = entry.sandbox.attachments.len();
        entry.sandbox.attachments.retain(|attachment| !named.covers(attachment));
        if entry.sandbox.attachments.len() == before {
            Detached::Nothing
        } else if entry.sandbox.attachments.is_empty() {
            Detached::Last(entry.sandbox.clone())
        } else {
            Detached::OneOfMany(entry.sandbox.clone())
        }
    }
}

/// What the removal of an attachment means for its sandbox.
#[derive(Debug)]
pub(super) enum Detached<N> {
    Nothing,
    OneOfMany(Sandbox<N>),
    Last(Sandbox<N>),
}
