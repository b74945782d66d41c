//! Real network namespaces in place of a node and its pods, and everything that traffic needs there.
//!
//! ```no_run
//! use culvert_tests::Lab;
//!
//! let lab = Lab::new();
//! let client = lab.pod("client").captured();
//! let server = lab.pod("server");
//! let echo = server.serve("[::]:80");
//! let wire = lab.wire();
//!
//! assert_eq!(client.connect((server.v4(), 80)).unwrap().say(b"hello"), b"hello");
//!
//! assert_eq!(echo.next_accepted().peer.ip(), client.v4());
//! let accepted = lab.ztunnel().wait_for_accepted(15001, 1);
//! assert_eq!(accepted[0].destination, (server.v4(), 80).into());
//! assert!(!wire.stop().syns_to((server.v4(), 80)).is_empty());
//! ```
//!
//! ```text
//!  node netns (of the test's thread)         own mount namespace, bpffs, /run/netns, cgroup
//!  ├ br0 10.244.0.1/16 fd00:244::1/64
//!  │  ├ veth-2 ── eth0 10.244.0.2 fd00:244::2   pod
//!  │  ├ veth-3 ── eth0 10.244.0.3 fd00:244::3   pod …
//!  └ out-2 ─── eth0 10.245.2.2 fd00:245:2::2    host outside, routed
//!  ztunnel netns: nothing but lo
//! ```
//!
//! One process has one lab: namespaces and cgroup belong to the process. nextest runs each test in a
//! process of its own; under bare `cargo test` name a single test. Whatever way the process ends, the
//! kernel takes the namespaces with it; the empty cgroup directory goes with the next lab.
//!
//! Errors of the lab itself panic with what was tried. Errors of the traffic are `io::Result`s.

#![expect(clippy::expect_used, reason = "test code outside #[test] functions: a panic shows the line")]
#![deny(missing_docs)]

mod address;
mod agent;
pub mod agent_process;
pub mod bench;
mod bpf;
mod cgroup;
pub mod chain;
mod client;
pub mod cni;
mod connection;
pub mod containerd;
mod datagram;
pub mod demo;
pub mod event;
mod eventually;
mod footprint;
mod foreign;
mod frame;
mod hammer;
mod host;
pub mod http;
mod ip;
mod isolation;
mod journal;
mod lab;
mod node_agent;
mod pod;
mod process;
mod real;
mod routing;
mod saw;
mod server;
pub mod stand_in;
mod statistics;
mod tcp_table;
mod topology;
mod traces;
pub mod troubleshooting;
mod tunnelled;
mod wire;
mod ztunnel;

pub use address::{Family, IntoAddress};
pub use agent::Note;
pub use agent_process::AgentProcess;
pub use bpf::BpfMap;
pub use caps::Capability;
pub use chain::{Chain, Plugins};
pub use client::Dial;
pub use cni::{Ended, Runtime};
pub use connection::Connection;
pub use containerd::{Containerd, Image, PodSpec, Sandbox};
pub use event::Event;
pub use eventually::{eventually, within};
pub use footprint::Footprint;
pub use foreign::{Direction, Foreign};
pub use frame::{Flags, Frame, Frames};
pub use hammer::{Attempts, while_connecting};
pub use host::Host;
pub use journal::{DEADLINE, Journal};
pub use lab::{Builder, Lab};
pub use node_agent::{NodeAgent, Start};
pub use pod::{CaptureError, Pod};
pub use routing::Routing;
pub use saw::{Accepted as AcceptedByZtunnel, Saw};
pub use server::{Accepted, Listen, Server};
pub use tcp_table::{TcpSocket, TcpState};
pub use tunnelled::Tunnelled;
pub use wire::Wire;
pub use ztunnel::{Behaviour, Ztunnel};
