//! Membership without Kubernetes: a watched file.

use std::{
    convert::Infallible,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

use super::{
    Decision, Described, Membership, Named, Redirection, Source, Undecided,
    file::{self, File},
    predicate::Rule,
};
use crate::{
    enroll::{Failure, Pod},
    error_chain::Chain,
    readiness::Readiness,
    scope_file::ScopeFile,
};

/// Editors write, rename and touch; all of it is one change.
const QUIET: Duration = Duration::from_millis(50);

/// After a scope file could not be written.
const AGAIN: Duration = Duration::from_secs(2);

/// Why the file cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is nothing to begin with.
    #[error(transparent)]
    File(#[from] file::Error),
    /// Changes would not be seen.
    #[error("cannot watch {path}")]
    Watch {
        /// The directory.
        path: PathBuf,
        /// The system's word.
        source: notify::Error,
    },
}

/// Decides by the last good content of a file.
#[derive(Debug)]
pub struct Standalone {
    path: PathBuf,
    rule: Rule,
    file: Mutex<Arc<File>>,
    changes: watch::Sender<u64>,
}

impl Standalone {
    /// Reads the file, which must be good.
    pub fn read(path: PathBuf, rule: Rule) -> Result<Self, Error> {
        let file = Mutex::new(Arc::new(File::read(&path)?));
        Ok(Self { path, rule, file, changes: watch::Sender::new(0) })
    }

    /// A file that is damaged or gone changes nothing but readiness.
    async fn watch(&self, scope: &ScopeFile, readiness: &Readiness) -> Result<Infallible, Error> {
        let directory = self.path.parent().filter(|path| !path.as_os_str().is_empty());
        let directory = directory.unwrap_or(Path::new("."));
        let changed = Arc::new(Notify::new());
        let watch_failed = |source| Error::Watch { path: directory.to_owned(), source };
        // The directory, not the file: it is replaced, and ConfigMaps swap a symbolic link beside it.
        let mut watcher = RecommendedWatcher::new(
            {
                let changed = Arc::clone(&changed);
                move |event: notify::Result<notify::Event>| {
                    // Our own reading is an access, too.
                    if !event.is_ok_and(|event| event.kind.is_access()) {
                        changed.notify_one();
                    }
                }
            },
            notify::Config::default(),
        )
        .map_err(watch_failed)?;
        watcher.watch(directory, RecursiveMode::NonRecursive).map_err(watch_failed)?;
        loop {
            // Also at the beginning: it may have changed before it was watched.
            self.reload(readiness);
            if scope.update(self.current().scope(&self.rule), readiness).await {
                changed.notified().await;
                tokio::time::sleep(QUIET).await;
            } else {
                drop(tokio::time::timeout(AGAIN, changed.notified()).await);
            }
        }
    }

    fn reload(&self, readiness: &Readiness) {
        match File::read(&self.path) {
            Ok(file) => {
                readiness.clear("standalone file");
                if *self.current() != file {
                    *self.lock() = Arc::new(file);
                    self.changes.send_modify(|change| *change += 1);
                    tracing::info!(path = %self.path.display(), "standalone file read");
                }
            }
            Err(error) => {
                let error = Chain(&error).to_string();
                tracing::error!(error, "the standalone file is not good; its last good content stands");
                readiness.report("standalone file", error);
            }
        }
    }

    fn current(&self) -> Arc<File> {
        Arc::clone(&self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Arc<File>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Membership for Standalone {
    async fn decide(&self, pod: &Named, deadline: Instant) -> Result<Decision, Undecided> {
        // The file may yet name the newer pod.
        let decide = || self.current().decide(&self.rule, pod);
        super::wait_for_decision(self.changes.subscribe(), deadline, decide).await
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn described(&self) -> Vec<Described> {
        self.current().described(&self.rule)
    }

    /// Nobody reads it.
    fn announce(&self, _pod: &Pod, _redirection: Redirection) {}

    /// The log has it.
    fn report(&self, _pod: &Pod, _failure: &Failure) {}
}

impl Source for Standalone {
    fn follow(
        self: Arc<Self>,
        scope: ScopeFile,
        readiness: Arc<Readiness>,
    ) -> impl Future<Output = ()> + Send {
        // Whoever waits until we are ready to end us is to find it right.
        scope.expect(&readiness);
        async move {
            let Err(error) = self.watch(&scope, &readiness).await;
            tracing::error!(error = %Chain(&error), "the standalone file is not followed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs};

    use culvert_cni::scope::Scope;
    use tokio::time::timeout;

    use super::*;
    use crate::membership::selector;

    const BEFORE: &str = "namespaces: {shop: {labels: {istio.io/dataplane-mode: ambient}}}";
    const AFTER: &str = "namespaces: {bank: {labels: {istio.io/dataplane-mode: ambient}}}";
    const LONG: Duration = Duration::from_secs(20);

    fn standalone(directory: &Path) -> Standalone {
        let path = directory.join("mesh.yaml");
        fs::write(&path, BEFORE).unwrap();
        let rule = Rule { selectors: selector::parse(selector::DEFAULT).unwrap(), excluded: BTreeSet::new() };
        Standalone::read(path, rule).unwrap()
    }

    async fn is_member(standalone: &Standalone, namespace: &str) -> bool {
        let pod = Named { namespace: namespace.into(), name: "web".into(), uid: Some("u1".into()) };
        matches!(standalone.decide(&pod, Instant::now()).await, Ok(Decision::Member { .. }))
    }

    #[tokio::test]
    async fn a_replaced_file_changes_decisions_and_scope_and_a_damaged_one_only_readiness() {
        let directory = tempfile::tempdir().unwrap();
        let standalone = standalone(directory.path());
        let scope_path = directory.path().join("lib/scope.json");
        let (scope, readiness) = (ScopeFile::new(scope_path.clone()), Readiness::default());
        let mut changes = standalone.changes();
        assert!(is_member(&standalone, "shop").await && !is_member(&standalone, "bank").await);
        let test = async {
            while Scope::read(&scope_path).is_err() {
                tokio::time::sleep(QUIET).await;
            }
            assert!(Scope::read(&scope_path).unwrap().contains("shop"));
            let new = directory.path().join("new.yaml");
            fs::write(&new, AFTER).unwrap();
            fs::rename(&new, &standalone.path).unwrap();
            changes.changed().await.unwrap();
            assert!(!is_member(&standalone, "shop").await && is_member(&standalone, "bank").await);
            while !Scope::read(&scope_path).unwrap().contains("bank") {
                tokio::time::sleep(QUIET).await;
            }
            fs::write(&standalone.path, "namespaces: {").unwrap();
            while readiness.reasons().is_empty() {
                tokio::time::sleep(QUIET).await;
            }
            assert!(is_member(&standalone, "bank").await);
        };
        let followed = async {
            tokio::select! {
                () = test => {}
                ended = standalone.watch(&scope, &readiness) => panic!("{ended:?}"),
            }
        };
        timeout(LONG, followed).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn an_older_pod_of_the_name_is_waited_out_until_the_deadline() {
        let directory = tempfile::tempdir().unwrap();
        let standalone = standalone(directory.path());
        fs::write(&standalone.path, "pods: [{namespace: shop, name: web, uid: old}]").unwrap();
        standalone.reload(&Readiness::default());
        let pod = Named { namespace: "shop".into(), name: "web".into(), uid: Some("new".into()) };
        let undecided = standalone.decide(&pod, Instant::now() + LONG).await.unwrap_err();
        assert!(matches!(undecided, Undecided::Another { .. }), "{undecided}");
    }
}
