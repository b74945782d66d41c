//! `CNI_ARGS`: who the pod is.

/// What a runtime says of the pod. Kubernetes' runtimes set name and namespace, most the uid as well.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Args {
    /// `K8S_POD_NAME`, empty if unset.
    pub name: String,
    /// `K8S_POD_NAMESPACE`, empty if unset.
    pub namespace: String,
    /// `K8S_POD_UID`, empty if unset. For a static pod the hash of its manifest.
    pub uid: String,
    /// `K8S_POD_INFRA_CONTAINER_ID`, empty if unset.
    pub infra_container_id: String,
}

/// `CNI_ARGS` breaks the convention of its format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A pair is not `key=value`.
    #[error("{0:?} in CNI_ARGS is not key=value")]
    NotAPair(String),
    /// A key is not ours, and `IgnoreUnknown` does not say that this is fine.
    #[error("{0:?} in CNI_ARGS is unknown, and IgnoreUnknown is not set")]
    UnknownKey(String),
    /// `IgnoreUnknown` is neither true nor false.
    #[error("IgnoreUnknown={0:?} in CNI_ARGS is neither true nor false")]
    NotABool(String),
}

impl Args {
    /// Reads `key=value` pairs, separated by `;`, as the reference implementation does: each pair has
    /// exactly one `=`, the last of equal keys counts, an empty text has no pairs.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut args = Self::default();
        let mut unknown = None;
        let mut ignore_unknown = false;
        for pair in text.split(';') {
            if text.is_empty() {
                break;
            }
            let (key, value) = pair
                .split_once('=')
                .filter(|(_, value)| !value.contains('='))
                .ok_or_else(|| Error::NotAPair(pair.to_owned()))?;
            match key {
                "K8S_POD_NAME" => value.clone_into(&mut args.name),
                "K8S_POD_NAMESPACE" => value.clone_into(&mut args.namespace),
                "K8S_POD_UID" => value.clone_into(&mut args.uid),
                "K8S_POD_INFRA_CONTAINER_ID" => value.clone_into(&mut args.infra_container_id),
                "IgnoreUnknown" => ignore_unknown = parse_bool(value)?,
                _ => unknown = Some(key),
            }
        }
        match unknown {
            Some(key) if !ignore_unknown => Err(Error::UnknownKey(key.to_owned())),
            _ => Ok(args),
        }
    }

    /// Whether the container is a Kubernetes pod.
    pub fn is_pod(&self) -> bool {
        !self.name.is_empty() && !self.namespace.is_empty()
    }
}

fn parse_bool(value: &str) -> Result<bool, Error> {
    match value {
        _ if value == "1" || value.eq_ignore_ascii_case("true") => Ok(true),
        _ if value == "0" || value.eq_ignore_ascii_case("false") => Ok(false),
        _ => Err(Error::NotABool(value.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[test]
    fn containerd_s_arguments_name_the_pod() {
        let args = Args::parse(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=c1;\
             K8S_POD_UID=u1;SOMETHING_NEW=x",
        )
        .unwrap();
        assert_eq!(
            args,
            Args {
                name: "web-0".into(),
                namespace: "shop".into(),
                uid: "u1".into(),
                infra_container_id: "c1".into()
            }
        );
        assert!(args.is_pod());
    }

    #[test]
    fn no_arguments_name_no_pod() {
        assert_eq!(Args::parse(""), Ok(Args::default()));
        assert!(!Args::default().is_pod());
        assert!(!Args::parse("K8S_POD_NAME=web-0").unwrap().is_pod());
    }

    #[rstest]
    #[case::no_equals_sign("K8S_POD_NAME", Error::NotAPair("K8S_POD_NAME".into()))]
    #[case::two_equals_signs("K8S_POD_NAME=a=b", Error::NotAPair("K8S_POD_NAME=a=b".into()))]
    #[case::trailing_separator("K8S_POD_NAME=a;", Error::NotAPair(String::new()))]
    #[case::unknown_key("FOO=a", Error::UnknownKey("FOO".into()))]
    #[case::unknown_key_not_ignored("IgnoreUnknown=false;FOO=a", Error::UnknownKey("FOO".into()))]
    #[case::no_bool("IgnoreUnknown=perhaps", Error::NotABool("perhaps".into()))]
    fn malformed_arguments_are_named(#[case] text: &str, #[case] error: Error) {
        assert_eq!(Args::parse(text), Err(error));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in any::<String>()) {
            drop(Args::parse(&text));
        }
    }
}
