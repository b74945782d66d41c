//! Running programs: each command line is shown, and a failure names it.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use anyhow::{Context as _, anyhow, bail};

/// Lines of a quiet command's output that its error repeats.
const TAIL: usize = 25;

/// Runs with the terminal's own input and output.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let line = echo(command);
    let status = command.status().with_context(|| format!("cannot start `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed: {status}");
    }
    Ok(())
}

/// Runs without showing the output; shows how long it took, and on failure the output's end.
pub(crate) fn run_quietly(command: &mut Command) -> anyhow::Result<()> {
    let line = echo(command);
    let start = Instant::now();
    let output = command.output().with_context(|| format!("cannot start `{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` failed: {}\n{}", output.status, tail(&output));
    }
    eprintln!("  done in {:.1} s", start.elapsed().as_secs_f32());
    Ok(())
}

/// Standard output of a query. Not shown: it changes nothing.
pub(crate) fn query(command: &mut Command) -> anyhow::Result<String> {
    let line = line(command);
    let output = command.output().with_context(|| format!("cannot start `{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` failed: {}\n{}", output.status, tail(&output));
    }
    String::from_utf8(output.stdout).with_context(|| format!("output of `{line}`"))
}

/// Standard output of a command whose progress, on standard error, is shown.
pub(crate) fn run_for_output(command: &mut Command) -> anyhow::Result<String> {
    let line = echo(command);
    let output =
        command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot start `{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` failed: {}", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("output of `{line}`"))
}

/// Becomes the program, so that signals and the exit code are its own. Returns only if that fails.
pub(crate) fn replace(command: &mut Command) -> anyhow::Error {
    let line = echo(command);
    anyhow!(command.exec()).context(format!("cannot start `{line}`"))
}

pub(crate) fn echo(command: &Command) -> String {
    let line = line(command);
    eprintln!("$ {line}");
    line
}

/// The command as a shell would take it.
fn line(command: &Command) -> String {
    let variables = command
        .get_envs()
        .filter(|(name, _)| *name != "CARGO_TARGET_DIR")
        .filter_map(|(name, value)| Some(format!("{}={}", name.display(), quote(value?))));
    let words = std::iter::once(command.get_program()).chain(command.get_args()).map(quote);
    variables.chain(words).collect::<Vec<_>>().join(" ")
}

/// One word of a bash command line.
pub(crate) fn quote(word: &OsStr) -> String {
    let text = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.into_owned();
    }
    if text.chars().any(|c| c.is_ascii_control()) {
        return format!("$'{}'", text.chars().map(escape).collect::<String>());
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Inside bash's `$'…'`.
fn escape(c: char) -> String {
    match c {
        '\'' | '\\' => format!("\\{c}"),
        c if c.is_ascii_control() => format!("\\x{:02x}", u32::from(c)),
        c => c.to_string(),
    }
}

fn tail(output: &Output) -> String {
    let text = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_a_shell() {
        let words = [
            "plain/path=1",
            "",
            "two words",
            "it's",
            "a\u{1f}b",
            "uname -r; ls $HOME \"x\"",
            "back\\slash\n",
        ];
        for word in words {
            let script = format!("printf %s {}", quote(OsStr::new(word)));
            let output = query(Command::new("bash").args(["-c", &script])).unwrap();
            assert_eq!(output, word, "{script}");
        }
    }
}
