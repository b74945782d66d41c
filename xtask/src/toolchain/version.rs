//! What compilers and linkers say about themselves.

#[derive(Debug, PartialEq, Eq)]
pub(super) struct RustcVersion {
    pub(super) release: String,
    pub(super) llvm: u32,
}

impl RustcVersion {
    pub(super) fn is_nightly(&self) -> bool {
        self.release.contains("-nightly") || self.release.contains("-dev")
    }
}

/// From the output of `rustc -vV`.
pub(super) fn rustc(output: &str) -> Option<RustcVersion> {
    let field = |name: &str| output.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    Some(RustcVersion { release: field("release:")?.to_owned(), llvm: major(field("LLVM version:")?)? })
}

/// From the output of `bpf-linker --llvm-args=--version`, whose `--version` does not name LLVM.
pub(super) fn linker_llvm(output: &str) -> Option<u32> {
    let (_, version) = output.split_once("LLVM version")?;
    major(version.trim_start())
}

/// Bitcode is readable by every LLVM of the same or a later major version.
fn major(version: &str) -> Option<u32> {
    version.split(['.', '-', '\n']).next()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stable_and_nightly_are_told_apart() {
        let stable = "rustc 1.95.0 (59807616e 2026-04-14)\nbinary: rustc\nhost: x86_64-unknown-linux-gnu\n\
                      release: 1.95.0\nLLVM version: 22.1.2\n";
        let stable = rustc(stable).unwrap();
        assert_eq!(stable, RustcVersion { release: "1.95.0".into(), llvm: 22 });
        assert!(!stable.is_nightly());

        let nightly = rustc("release: 1.99.0-nightly\nLLVM version: 23.0.0\n").unwrap();
        assert!(nightly.is_nightly());
        assert_eq!(nightly.llvm, 23);
    }

    #[test]
    fn a_compiler_without_llvm_has_no_version() {
        assert_eq!(rustc("release: 1.99.0\n"), None);
        assert_eq!(rustc(""), None);
    }

    #[test]
    fn llvm_of_the_linker_is_read_with_and_without_a_vendor() {
        assert_eq!(linker_llvm("Debian LLVM version 22.1.8\n  Optimized build.\n"), Some(22));
        assert_eq!(linker_llvm("LLVM (http://llvm.org/):\n  LLVM version 21.1.0-rc1\n"), Some(21));
        assert_eq!(linker_llvm("bpf-linker 0.13.0\n"), None);
    }
}
