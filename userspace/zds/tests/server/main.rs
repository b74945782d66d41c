//! The server against scripted ztunnels over real sockets.

#![allow(clippy::unwrap_used, reason = "test code outside #[test] functions")]

mod hello;
mod introduction;
mod loss;
mod requests;
mod snapshot;
mod socket;
#[path = "../ztunnel/mod.rs"]
mod ztunnel;

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, time::Duration};

use culvert_zds::{
    Config, Entry, Error, Owner as _, Server,
    wire::{self, Ack, Request},
};
use futures::FutureExt as _;
use tokio::time::Instant;
use tokio_seqpacket::UnixSeqpacketListener;
use ztunnel::{
    Introduce, Lab, SOON, Seen, Ztunnel, add, del, inode, joined, keep, send_with_descriptor, workload,
};
