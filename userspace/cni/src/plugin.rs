//! The process that a container runtime starts: environment and stdin in, a result or an error object
//! out.
//!
//! Nothing but these is written to stdout. The log goes to the agent or, without one, to stderr.
//! Whatever happens, a panic included, an ADD that did not succeed ends with an error object.

use std::{
    any::Any,
    ffi::OsStr,
    io::{self, Write as _},
    panic::{self, AssertUnwindSafe},
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use crate::{
    answer::Refusal,
    client::Client,
    codes::Code,
    config::Config,
    log::{Level, Log},
};

mod add;
mod conversation;
mod environment;
mod spec;
mod stdin;
#[cfg(test)]
mod tests;
mod verbs;

use environment::{Call, Environment};
use spec::{Verb, Version};

/// How long a pod that may be none of ours, or a verb that decides nothing, waits for a silent agent.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the delivery of the log may take, after the result is out.
const LOG_DELIVERY: Duration = Duration::from_millis(200);

/// Reads the invocation, answers it and ends. The whole of the binary.
pub fn main() -> ExitCode {
    let environment = Environment::of_process();
    let mut plugin = Plugin::new(Instant::now());
    let answer = guarded(environment.command(), || {
        plugin.answer(&environment, || stdin::read(io::stdin(), Instant::now() + stdin::PATIENCE))
    });
    let answer = answer.map_err(|refusal| plugin.explain(refusal));
    let (output, failed) = match &answer {
        Ok(result) => (result.clone(), false),
        Err(refusal) => (spec::error_json(plugin.version, refusal), true),
    };
    let written = io::stdout().write_all(output.as_bytes()).and_then(|()| io::stdout().flush());
    if let Err(error) = &written {
        plugin.log.line(Level::Error, format!("the answer cannot be written to stdout: {error}"));
        plugin.agent = None;
    }
    plugin.deliver_log();
    ExitCode::from(u8::from(failed || written.is_err()))
}

/// One invocation.
struct Plugin {
    started: Instant,
    /// What an error object is declared under: the configuration's version as soon as it is known.
    version: Version,
    /// The pod, for messages.
    pod: Option<String>,
    log: Log,
    log_level: Level,
    /// Socket of the agent, while there is reason to think that it takes the log.
    agent: Option<PathBuf>,
}

impl Plugin {
    fn new(started: Instant) -> Self {
        Self {
            started,
            version: Version::CURRENT,
            pod: None,
            log: Log::default(),
            log_level: Level::default(),
            agent: None,
        }
    }

    /// What goes to stdout.
    fn answer(
        &mut self,
        environment: &Environment,
        stdin: impl FnOnce() -> Result<Vec<u8>, Refusal>,
    ) -> Result<String, Refusal> {
        let verb = environment.verb()?;
        self.log.label("verb", verb.into());
        match verb {
            Verb::Version => spec::version_json(),
            Verb::Add => {
                let call = self.call(environment)?;
                let config = self.configure(verb, &stdin()?)?;
                self.add(&call, &config)
            }
            Verb::Check => {
                let call = self.call(environment)?;
                let config = self.configure(verb, &stdin()?)?;
                self.check(&call, &config).map(|()| String::new())
            }
            Verb::Del => {
                let call = environment.call_for_del()?;
                self.introduce(&call);
                self.del(&call, stdin());
                Ok(String::new())
            }
            Verb::Status => {
                let configured = stdin().and_then(|stdin| self.configure(verb, &stdin));
                self.status(&configured.map_err(verbs::every_add_would_fail)?);
                Ok(String::new())
            }
            Verb::Gc => {
                environment.require_path()?;
                let config = self.configure(verb, &stdin()?)?;
                self.gc(&config).map(|()| String::new())
            }
        }
    }

    fn call(&mut self, environment: &Environment) -> Result<Call, Refusal> {
        let call = environment.call()?;
        self.introduce(&call);
        Ok(call)
    }

    /// Says whom the messages from now on are about.
    fn introduce(&mut self, call: &Call) {
        let Call { container_id, args, .. } = call;
        self.log.label("container", container_id);
        if args.is_pod() {
            self.log.label("pod", &format!("{}/{}", args.namespace, args.name));
            self.log.label("uid", &args.uid);
            let uid = if args.uid.is_empty() { "unknown" } else { &args.uid };
            self.pod =
                Some(format!("pod {}/{} (uid {uid}, container {container_id})", args.namespace, args.name));
        }
    }

    /// Reads and judges the configuration, in the order of the reference implementation.
    fn configure(&mut self, verb: Verb, stdin: &[u8]) -> Result<Config, Refusal> {
        let config = Config::decode(stdin)?;
        self.version = spec::declared(&config)?;
        spec::negotiate(self.version, verb)?;
        spec::check_name(&config)?;
        config.check()?;
        self.adopt(&config);
        Ok(config)
    }

    fn adopt(&mut self, config: &Config) {
        self.agent = Some(config.socket());
        self.log_level = config.log_level();
    }

    /// Completes an error with what the user of a runtime needs: the pod, the step and the remedy.
    fn explain(&mut self, refusal: Refusal) -> Refusal {
        let Refusal { code, msg, details } = refusal;
        let pod = self.pod.as_ref().map(|pod| format!("{pod}: ")).unwrap_or_default();
        let why = if details.is_empty() { String::new() } else { format!(": {details}") };
        let details = format!("{pod}step \"{}\" failed{why}. What to do: {}", code.step(), code.remedy());
        self.log.line(Level::Error, format!("{msg} (code {code}): {details}"));
        Refusal { code, msg, details }
    }

    /// To the agent if it is there, so that one log tells of a pod; else to the runtime's journal.
    fn deliver_log(&self) {
        let batch = self.log.batch(self.log_level);
        if batch.0.is_empty() {
            return;
        }
        if let Some(socket) = &self.agent {
            let client = client(socket.clone(), Instant::now() + LOG_DELIVERY);
            if conversation::block_on(&client, client.log(&batch)).is_ok() {
                return;
            }
        }
        // Nobody is left to tell that stderr is closed.
        drop(writeln!(io::stderr(), "{}", batch.0.join("\n")));
    }
}

fn client(socket: PathBuf, deadline: Instant) -> Client {
    // The runtime starts us as root, so this is root. In a test it is whoever runs the test.
    Client::new(socket, deadline).server_uid(nix::unistd::geteuid().as_raw())
}

/// Turns a panic into the verb's failure. An ADD fails with "try later": the runtime's retry is all
/// that can be done about a bug. The other verbs are never to fail for a reason of ours. The message and
/// the place of the panic are on stderr (the standard hook).
fn guarded(
    command: Option<&OsStr>,
    answer: impl FnOnce() -> Result<String, Refusal>,
) -> Result<String, Refusal> {
    panic::catch_unwind(AssertUnwindSafe(answer)).unwrap_or_else(|payload| {
        match command.and_then(OsStr::to_str) {
            Some("DEL" | "CHECK" | "STATUS" | "GC") => Ok(String::new()),
            _ => Err(Refusal::new(
                Code::TryLater,
                "culvert-cni panicked",
                format!("a bug of the plugin: {}", message(&*payload)),
            )),
        }
    })
}

fn message(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
