//! In place of a CNI plugin, whose name it bears: runs the plugin and notes how long it took.

use std::{
    env, fs, io,
    io::Write as _,
    path::Path,
    process::{Command, ExitCode},
    time::Instant,
};

/// Directory of the real plugins.
const PLUGINS: &str = "LAB_PLUGINS";
/// File that gets a line for each run: name, verb, microseconds.
const TIMES: &str = "LAB_TIMES";

fn main() -> io::Result<ExitCode> {
    let variable = |name| env::var(name).map_err(io::Error::other);
    let own = env::args_os().next().unwrap_or_default();
    let name = Path::new(&own).file_name().unwrap_or_default();
    let begin = Instant::now();
    let status = Command::new(Path::new(&variable(PLUGINS)?).join(name)).status()?;
    let took = begin.elapsed().as_micros();
    let mut times = fs::OpenOptions::new().create(true).append(true).open(variable(TIMES)?)?;
    writeln!(times, "{} {} {took}", name.display(), variable("CNI_COMMAND")?)?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}
