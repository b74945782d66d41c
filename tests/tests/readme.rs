//! README.md says what is true.
#![expect(clippy::unwrap_used, reason = "test code outside #[test] functions: a panic shows the line")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

use culvert_abi::Counter;
use culvert_tests::{Family, Lab, troubleshooting};

/// Shorter words are numbers in hex.
const SHORTEST_NAME: usize = 3;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// From a heading to the next one that is not below it.
fn section<'a>(readme: &'a str, heading: &str) -> &'a str {
    let (_, section) = readme.split_once(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("no {heading}"));
    let depth = heading.find(' ').unwrap();
    let ends = (1..=depth).filter_map(|depth| section.find(&format!("\n{} ", "#".repeat(depth))));
    &section[..ends.min().unwrap_or(section.len())]
}

/// The contents of the fenced blocks of a kind.
fn blocks<'a>(text: &'a str, kind: &str) -> Vec<&'a str> {
    text.split(&format!("\n```{kind}\n")).skip(1).map(|rest| rest.split("\n```").next().unwrap()).collect()
}

/// First cells of a section's tables.
fn first_cells(section: &str) -> Vec<&str> {
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.map(|row| row.split("` |").next().unwrap()).collect()
}

/// Each counter's documentation, by name.
fn documentation() -> BTreeMap<String, String> {
    let source = read("ebpf/abi/src/counter.rs");
    let (_, source) = source.split_once("\ncounters! {\n").unwrap();
    let mut doc = Vec::new();
    let mut documented = BTreeMap::new();
    for line in source.lines().map(str::trim).take_while(|line| *line != "}") {
        match line.strip_prefix("/// ") {
            Some(text) => doc.push(text),
            None => {
                let name = line.trim_end_matches(',').split(' ').next_back().unwrap();
                documented.insert(name.to_owned(), doc.join(" "));
                doc.clear();
            }
        }
    }
    documented
}

/// The table as it must be: a row for each counter, under a row for each group.
fn counters_table() -> String {
    let documented = documentation();
    let mut lines = vec!["| counter | meaning |".to_owned(), "|---|---|".to_owned()];
    let mut group = "";
    for counter in Counter::ALL {
        let text = &documented[counter.name()];
        let (prefix, meaning) = text.split_once(": ").unwrap_or((group, text));
        if prefix != group {
            lines.push(format!("| **{prefix}** | |"));
            group = prefix;
        }
        lines.push(format!("| `{}` | {meaning} |", counter.name()));
    }
    lines.join("\n")
}

#[test]
fn the_readme_explains_every_counter_in_its_own_words() {
    let table = counters_table();
    let readme = read("README.md");
    assert_eq!(
        first_cells(section(&readme, "### Counters")),
        Counter::ALL.map(Counter::name),
        "put this table there:\n{table}"
    );
    assert!(readme.contains(&table), "the words differ; put this table there:\n{table}");
}

#[test]
fn the_readme_quotes_errors_and_checks_that_exist() {
    let sources = ["error.rs", "probe/environment.rs", "probe/kernel.rs"]
        .map(|file| read(&format!("userspace/dataplane/src/{file}")))
        .concat();
    // String literals go on after a backslash at the end of a line.
    let sources: String = sources.split("\\\n").map(str::trim_start).collect();
    let readme = read("README.md");
    let quoted = first_cells(section(&readme, "### Errors"));
    assert!(quoted.len() > 15, "{quoted:?}");
    for quote in quoted {
        let known = quote.split('…').all(|part| sources.contains(part.trim()));
        assert!(known, "no error or check says {quote:?}");
    }
}

/// Words that name something, counters aside: which of those are not zero is the traffic's business.
fn names(output: &str) -> BTreeSet<&str> {
    let words = output.split(|c: char| !c.is_ascii_alphabetic() && c != '_');
    let is_counter = |word: &str| Counter::ALL.iter().any(|counter| counter.name() == word);
    words.filter(|word| word.len() >= SHORTEST_NAME && !is_counter(word)).collect()
}

#[test]
fn the_readmes_commands_print_what_it_shows() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client").captured(), lab.pod("server").captured());
    let _echo = server.serve("[::]:80");
    for family in Family::BOTH {
        assert_eq!(client.connect(server.at(family, 80)).unwrap().say(b"hello"), b"hello");
    }
    let readme = read("README.md");
    let section = section(&readme, "## Debug with bpftool");
    let preparation = blocks(section, "sh").concat();
    let (sample, preparation) = preparation.split_once('\n').expect("the cookie, then the key");
    assert!(sample.starts_with("cookie="), "{sample}");
    let preparation = format!("cookie={}\n{preparation}", client.cookie());
    let samples = blocks(section, "console");
    assert_eq!(samples.len(), 5);
    for sample in samples {
        let (command, shown) = sample.strip_prefix("$ ").and_then(|rest| rest.split_once('\n')).unwrap();
        let output = Command::new("sh").args(["-ec", &format!("{preparation}\n{command}")]).output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{command}: {}: {said}", output.status);
        assert!(!printed.trim().is_empty(), "{command} prints nothing");
        assert_eq!(names(&printed), names(shown), "{command} prints\n{printed}");
    }
}

#[test]
fn the_readme_names_files_of_an_add_that_exist() {
    let readme = read("README.md");
    let steps = section(&readme, "### How an ADD works");
    let files: Vec<_> = steps.split('`').filter(|word| word.starts_with("userspace/")).collect();
    assert!(files.len() >= 6, "{files:?}");
    for file in files {
        read(file);
    }
}

/// Each failure that a test sees must be a row ([`Ended::fails`](culvert_tests::Ended::fails)); here the
/// other way round.
#[test]
fn each_row_about_a_failed_add_is_the_message_of_a_test() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/add");
    let files = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let tests: String = files.map(|path| fs::read_to_string(path).unwrap()).collect();
    // A string literal goes on after a backslash at the end of a line.
    let tests: String = tests.split("\\\n").map(str::trim_start).collect();
    let messages = troubleshooting::messages();
    assert!(messages.len() > 15, "{messages:?}");
    for message in messages {
        assert!(tests.contains(&format!("{message:?}")), "no test has the message {message:?}");
    }
}
