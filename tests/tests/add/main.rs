//! A pod enters the mesh: the real plugin, the real agent, real namespaces; ztunnel's stand-in, or the real one.

#![expect(clippy::unwrap_used, reason = "test code outside #[test] functions: a panic shows the line")]

mod cancel;
mod files;
mod netns;
mod restart;
mod storm;
mod traffic;
mod variants;
mod verbs;
mod ztunnel;
