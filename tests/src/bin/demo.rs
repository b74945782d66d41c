//! Two captured pods beside one that is not, real traffic between them, and what became of it.

use std::process::ExitCode;

fn main() -> ExitCode {
    culvert_tests::demo::run()
}
