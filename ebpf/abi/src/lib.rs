//! The contract between Culvert's kernel programs and the process that loads them.
//!
//! Every key, value, constant, counter and name that both sides use is defined here once. The types
//! are `#[repr(C)]`, made of fixed-width integers only, and carry their padding as named fields, so
//! that the bytes in a map mean the same on both sides. Integers are in host byte order unless the
//! field's name ends in `_be`. Addresses are always 16 bytes, IPv4 in its IPv4-mapped form
//! (RFC 4291 §2.5.5.2), so one code path serves both families.

#![no_std]
#![deny(missing_docs)]

pub mod address;
pub mod counter;
pub mod flow;
pub mod listener;
pub mod names;
pub mod pod;
pub mod ztunnel;

pub use address::{Address, OwnAddress};
pub use counter::{Counter, Counters};
pub use flow::FlowKey;
pub use listener::ListenerKey;
pub use pod::PodEntry;

/// Marks the map types as plain data for the loader.
#[cfg(feature = "user")]
mod plain {
    // SAFETY: sixteen bytes, every bit pattern is valid.
    unsafe impl aya::Pod for crate::Address {}
    // SAFETY: `repr(C)`, integers only, no implicit padding: the size is asserted beside the type.
    unsafe impl aya::Pod for crate::OwnAddress {}
    // SAFETY: as above.
    unsafe impl aya::Pod for crate::Counters {}
    // SAFETY: as above.
    unsafe impl aya::Pod for crate::FlowKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for crate::ListenerKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for crate::PodEntry {}
}
