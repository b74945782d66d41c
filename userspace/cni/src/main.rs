//! `culvert-cni`: started by a container runtime for each verb, at the end of a plugin chain.

use std::process::ExitCode;

fn main() -> ExitCode {
    culvert_cni::plugin::main()
}
