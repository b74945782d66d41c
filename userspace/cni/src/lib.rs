//! The CNI plugin, and the protocol by which it asks the agent of its node.
//!
//! ```text
//!  runtime ──environment, stdin──► plugin ──POST over a unix socket──► agent
//!     ▲                              │ no agent: config, then scope file
//!     └──── result or error object ──┘
//! ```
//!
//! [`plugin`] is the process that a container runtime starts. The rest is shared with the agent, which
//! serves the other end of the socket:
//!
//! | endpoint | request | answer, status 200 |
//! |---|---|---|
//! | `/cmdadd` | [`event::AddEvent`], Istio's JSON and more | [`answer::Answer`] |
//! | `/cmddel` | [`event::Attachment`] | [`answer::Answer`] |
//! | `/check` | [`event::Attachment`] | [`answer::Answer`] |
//! | `/status` | [`event::StatusRequest`] | [`answer::Status`] |
//! | `/gc` | [`event::GcRequest`] | [`answer::Answer`] |
//! | `/log` | [`log::Batch`], Istio's JSON | anything |
//!
//! Any other status carries an [`answer::Refusal`], whose code becomes the CNI error of the plugin. An
//! answer that carries none does not come from our agent, and decides nothing.
//!
//! Who may pass while the agent is away is in [`exempt`] (own pods, from the network configuration)
//! and [`scope`] (the rest, from a file that the agent keeps).

#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod answer;
pub mod args;
pub mod client;
pub mod codes;
pub mod config;
mod document;
pub mod event;
pub mod exempt;
pub mod log;
pub mod plugin;
pub mod scope;
