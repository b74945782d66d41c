//! The node agent: takes pods into the mesh and out of it.
//!
//! ```text
//!  plugin ──cni.sock──► cni_server ──► membership (who?) ──► enroll (the one owner of pods)
//!  API server ──watch──► membership ──► reconcile ─ discover ──►│            │
//!                                                              │            │
//!                                                     culvert_dataplane   workloads ──ZDS──► ztunnel
//! ```
//!
//! [`app`] builds and joins the parts; begin reading there, then [`enroll`].

#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod admin;
pub mod app;
pub mod cni_server;
pub mod config;
pub mod discover;
pub mod enroll;
mod error_chain;
pub mod membership;
pub mod metrics;
pub mod ownership;
pub mod readiness;
pub mod reconcile;
pub mod record;
pub mod scope_file;
pub mod self_test;
pub mod telemetry;
pub mod unix_socket;
pub mod workloads;
