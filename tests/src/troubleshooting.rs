//! README's table of failed ADDs, which every failure of a test must be in.

use std::{fs, path::Path};

/// Heading of the section.
pub const SECTION: &str = "### When an ADD fails";

/// First cells of its table, without their backquotes.
pub fn messages() -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let readme = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let (_, section) = readme.split_once(&format!("\n{SECTION}\n")).unwrap_or_else(|| panic!("no {SECTION}"));
    let section = section.split("\n#").next().unwrap_or_default();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.filter_map(|row| row.split("` |").next()).map(str::to_owned).collect()
}

/// Whether a text has the parts of a message, which `…` separates, in their order.
pub fn fits(message: &str, text: &str) -> bool {
    let mut rest = text;
    message.split('…').map(str::trim).all(|part| match rest.find(part) {
        Some(at) => {
            rest = rest.get(at + part.len()..).unwrap_or_default();
            true
        }
        None => false,
    })
}
