//! The plugin as a runtime meets it: environment and stdin, stdout and exit code, with a scripted agent
//! on the other side.

#![allow(clippy::unwrap_used, reason = "a test ends with what it did not expect")]

mod absence;
mod add;
mod agent;
mod bad_input;
mod node;
mod other_verbs;
mod versions;
