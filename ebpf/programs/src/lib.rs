//! Culvert's kernel programs.
//!
//! The decisions ([`steer`], [`outbound`], [`inbound`], [`ports`], [`marks`]) are pure functions that host tests
//! cover; [`context`] reads what they need out of the kernel's contexts, [`maps`] holds the state, and
//! `src/bin` has the programs: `pod.rs` is attached to one pod's netns, `node.rs` once per node.

#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

#[cfg(not(target_arch = "bpf"))]
extern crate std;

pub mod context;
pub mod inbound;
pub mod maps;
pub mod marks;
pub mod outbound;
pub mod ports;
pub mod socket;
pub mod steer;

/// Reaching it makes the verifier reject the program: nothing here may panic.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
