//! Redirects the TCP traffic of one network namespace to the ztunnel listeners inside it.
//!
//! Knows nothing of Kubernetes, pods' names or ZDS. A [`Dataplane`] is the node's part: the programs on
//! the cgroup root and the pinned maps. Each pod's netns is then taken through
//!
//! 1. [`Dataplane::register`]: the `sk_lookup` program, routing, sysctls, own addresses; ztunnel's listeners
//!    are stored from now on;
//! 2. ztunnel opens its listeners (the caller's business);
//! 3. [`Dataplane::check_listeners`]: they are ztunnel's, transparent, and nobody else's are there;
//! 4. [`Dataplane::activate`]: the one write that starts capture;
//! 5. [`Dataplane::withdraw`] and [`Dataplane::restore`], or [`Dataplane::forget`] once the netns is gone.
//!
//! Links and maps are pinned: a process that ends changes nothing for traffic, and the next one adopts
//! what it finds and replaces the programs without a gap.

#![deny(missing_docs)]

mod bpf;
mod config;
mod error;
mod guard;
mod index;
mod introduction;
mod listeners;
mod maps;
mod netlink;
mod netns;
mod node;
mod object;
mod pins;
mod pod;
mod pod_addresses;
pub mod probe;
mod reserved_ports;
mod routing;
mod sockets;
mod sysctl;
mod watch;

pub use config::Config;
pub use error::Error;
pub use introduction::Introduction;
pub use netns::Netns;
pub use node::Dataplane;
pub use pod::{Options, Restored};
