//! What serde_json alone lets through in a document: the same key twice, and nesting of any depth
//! under a key that nobody reads.

use std::{collections::HashSet, fmt};

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

/// Succeeds for one JSON object in UTF-8, if neither it nor an object inside has a key twice and
/// nothing is nested deeper than serde_json's limit. Needs memory for the keys only.
pub(crate) fn check(document: &[u8]) -> Result<(), serde_json::Error> {
    serde_json::from_slice::<Checked>(document)?;
    // serde takes a list for a struct, too.
    if document.trim_ascii_start().starts_with(b"{") {
        Ok(())
    } else {
        Err(serde_json::Error::custom("not an object"))
    }
}

struct Checked;

impl<'de> Deserialize<'de> for Checked {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Not deserialize_ignored_any, which skips without a limit.
        deserializer.deserialize_any(Walk)
    }
}

struct Walk;

impl<'de> DeserializeSeed<'de> for Walk {
    type Value = Checked;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Checked, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk {
    type Value = Checked;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_str<E>(self, _: &str) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Checked, A::Error> {
        while seq.next_element::<Checked>()?.is_some() {}
        Ok(Checked)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Checked, A::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if keys.contains(&key) {
                return Err(A::Error::custom(format_args!("key {key:?} occurs twice")));
            }
            keys.insert(key);
            map.next_value::<Checked>()?;
        }
        Ok(Checked)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::a_configuration(r#"{"name":"n","a":[1,-2,3.5,null,true,"x",{"name":"other object"}]}"#, true)]
    #[case::a_key_twice(r#"{"name":"n","name":"n"}"#, false)]
    #[case::a_key_twice_inside(r#"{"a":[{"b":1,"b":2}]}"#, false)]
    #[case::a_key_twice_by_escape(r#"{"a":1,"\u0061":2}"#, false)]
    #[case::truncated(r#"{"name":"#, false)]
    #[case::two_values("{}{}", false)]
    #[case::empty("", false)]
    #[case::a_list("[]", false)]
    fn a_document_says_each_thing_once(#[case] document: &str, #[case] passes: bool) {
        assert_eq!(check(document.as_bytes()).is_ok(), passes);
    }

    #[test]
    fn nesting_has_a_limit() {
        let nested = |depth: usize| format!("{{\"a\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
        assert!(check(nested(100).as_bytes()).is_ok());
        assert!(check(nested(200).as_bytes()).is_err());
        assert!(check("[".repeat(1 << 20).as_bytes()).is_err());
    }

    #[test]
    fn text_is_utf_8() {
        assert!(check(b"{\"a\":\"\xff\"}").is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_passed_or_refused(bytes in any::<Vec<u8>>()) {
            drop(check(&bytes));
        }
    }
}
