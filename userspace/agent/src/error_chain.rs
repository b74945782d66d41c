//! An error with all its causes in one line.

use std::{error::Error, fmt};

/// Displays as `error: cause: its cause`. A cause whose text the line ends with already is left out.
pub(crate) struct Chain<'a>(pub(crate) &'a (dyn Error + 'static));

impl Chain<'_> {
    /// The causes alone.
    pub(crate) fn causes(&self) -> String {
        self.0.source().map(|cause| Chain(cause).to_string()).unwrap_or_default()
    }
}

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = self.0.to_string();
        let mut cause = self.0.source();
        while let Some(error) = cause {
            let text = error.to_string();
            if !line.ends_with(&text) {
                line = format!("{line}: {text}");
            }
            cause = error.source();
        }
        f.write_str(&line)
    }
}
