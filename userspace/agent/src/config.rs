//! The whole configuration: flags, each of them an environment variable too.

use std::{collections::BTreeSet, net::SocketAddr, path::PathBuf, time::Duration};

use clap::Parser;

use crate::membership::{
    predicate::Rule,
    selector::{self, Unreadable},
};

/// The node agent of Culvert: takes pods into the mesh and out of it.
#[derive(Clone, Debug, Parser)]
#[command(name = "culvert-agent", version)]
pub struct Config {
    /// Without Kubernetes: who is in the mesh, as a YAML file that is watched
    #[arg(long, env = "CULVERT_STANDALONE", value_name = "FILE", conflicts_with = "kubeconfig")]
    pub standalone: Option<PathBuf>,

    /// Way to the API server [default: that of a pod: KUBERNETES_SERVICE_HOST and the service account]
    #[arg(long, env = "CULVERT_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// The node whose pods are this agent's, as spec.nodeName has it
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    pub node_name: Option<String>,

    /// Sockets, lock and records; a directory that a reboot clears
    #[arg(long, env = "CULVERT_RUN_DIR", default_value = "/var/run/culvert", value_name = "DIR")]
    pub run_dir: PathBuf,

    /// Where ztunnel connects
    #[arg(
        long,
        env = "CULVERT_ZDS_SOCKET",
        default_value = "/var/run/ztunnel/ztunnel.sock",
        value_name = "PATH"
    )]
    pub zds_socket: PathBuf,

    /// Which pods the plugin may let pass while the agent is away; survives a reboot
    #[arg(long, env = "CULVERT_SCOPE_FILE", default_value = culvert_cni::scope::DEFAULT_PATH, value_name = "FILE")]
    pub scope_file: PathBuf,

    /// Namespaces whose pods are never in the mesh
    #[arg(
        long,
        env = "CULVERT_EXCLUDE_NAMESPACES",
        value_delimiter = ',',
        default_value = "kube-system",
        value_name = "NAME,…"
    )]
    pub exclude_namespaces: Vec<String>,

    /// Who is in the mesh by labels: a YAML list as Istio's AMBIENT_ENABLEMENT_SELECTOR
    #[arg(long, env = "AMBIENT_ENABLEMENT_SELECTOR", default_value = selector::DEFAULT, hide_default_value = true, value_name = "YAML")]
    pub selectors: String,

    /// The host's procfs, read-write
    #[arg(long, env = "CULVERT_HOST_PROC", default_value = "/proc", value_name = "DIR")]
    pub host_proc: PathBuf,

    /// Root of the host's cgroup2 hierarchy [default: where it is mounted]
    #[arg(long, env = "CULVERT_HOST_CGROUP", value_name = "DIR")]
    pub host_cgroup: Option<PathBuf>,

    /// The host's bpffs
    #[arg(long, env = "CULVERT_BPFFS", default_value = "/sys/fs/bpf", value_name = "DIR")]
    pub bpffs: PathBuf,

    /// The host's root, below which the runtime's netns paths are found
    #[arg(long, env = "CULVERT_NETNS_PREFIX", default_value = "/", value_name = "DIR")]
    pub netns_prefix: PathBuf,

    /// The host's netns [default: <host-proc>/1/ns/net]
    #[arg(long, env = "CULVERT_HOST_NETNS", value_name = "PATH")]
    pub host_netns: Option<PathBuf>,

    /// Address of healthz, readyz and metrics
    #[arg(long, env = "CULVERT_HTTP", default_value = "0.0.0.0:15014", value_name = "ADDRESS")]
    pub http: SocketAddr,

    /// The plugin's timeoutSeconds: an ADD that fails is answered a second before
    #[arg(long, env = "CULVERT_ADD_TIMEOUT", default_value = "20s", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub add_timeout: Duration,

    /// Large packets on the pods' own lo
    #[arg(long, env = "CULVERT_BIG_TCP", default_value_t = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub big_tcp: bool,

    /// Where istio-cni's agent listens; with that one alive this one does not start
    #[arg(
        long,
        env = "CULVERT_ISTIO_SOCKET",
        default_value = "/var/run/istio-cni/pluginevent.sock",
        value_name = "PATH"
    )]
    pub istio_socket: PathBuf,

    /// Start without checking what the node offers. For tests, whose cgroup is not the host's root
    #[arg(long, env = "CULVERT_SKIP_PROBE", hide = true)]
    pub skip_probe: bool,

    /// Log levels, as in RUST_LOG
    #[arg(long, env = "CULVERT_LOG", default_value = "info", value_name = "DIRECTIVES")]
    pub log: String,
}

/// Time for the answer to reach the plugin.
const REPLY: Duration = Duration::from_secs(1);

impl Config {
    /// Time of an ADD from its arrival to its answer, its undoing included.
    pub fn add_deadline(&self) -> Duration {
        self.add_timeout.saturating_sub(REPLY).max(REPLY)
    }

    /// Who is in the mesh.
    pub fn rule(&self) -> Result<Rule, Unreadable> {
        let excluded: BTreeSet<String> =
            self.exclude_namespaces.iter().filter(|name| !name.is_empty()).cloned().collect();
        Ok(Rule { selectors: selector::parse(&self.selectors)?, excluded })
    }

    /// As the dataplane wants it.
    pub fn dataplane(&self) -> culvert_dataplane::Config {
        let default = culvert_dataplane::Config::default();
        culvert_dataplane::Config {
            bpffs: self.bpffs.clone(),
            cgroup: self.host_cgroup.clone().unwrap_or(default.cgroup),
            host_netns: self.host_netns.clone().unwrap_or_else(|| self.host_proc.join("1/ns/net")),
            proc: self.host_proc.clone(),
            big_tcp: self.big_tcp,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::CommandFactory as _;

    use super::*;

    fn parse(arguments: &[&str]) -> Config {
        Config::parse_from([&["culvert-agent", "--standalone", "mesh.yaml"], arguments].concat())
    }

    #[test]
    fn the_command_line_is_consistent() {
        Config::command().debug_assert();
    }

    #[test]
    fn the_host_s_netns_is_found_below_its_proc() {
        let config = parse(&["--host-proc", "/host/proc"]);
        assert_eq!(config.dataplane().host_netns, Path::new("/host/proc/1/ns/net"));
        assert_eq!(parse(&["--host-netns", "/x"]).dataplane().host_netns, Path::new("/x"));
    }

    #[test]
    fn defaults_are_those_of_the_plugin_and_of_ztunnel() {
        let config = parse(&[]);
        assert_eq!(config.zds_socket, Path::new("/var/run/ztunnel/ztunnel.sock"));
        assert_eq!(config.scope_file, Path::new(culvert_cni::scope::DEFAULT_PATH));
        assert_eq!(config.add_deadline(), Duration::from_secs(19));
        let rule = config.rule().unwrap();
        assert_eq!((rule.selectors.len(), rule.excluded), (2, ["kube-system".to_owned()].into()));
    }

    #[test]
    fn every_flag_has_a_variable() {
        let without: Vec<_> = Config::command()
            .get_arguments()
            .filter(|argument| argument.get_env().is_none())
            .map(|argument| argument.get_id().to_string())
            .collect();
        assert_eq!(without, Vec::<String>::new());
    }
}
