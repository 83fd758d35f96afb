//! The small part of XML that listings and error replies need.

use quick_xml::Reader;
use quick_xml::events::Event;

/// Texts of all elements with this name, in order.
pub(super) fn texts(body: &[u8], name: &str) -> Vec<String> {
    let mut reader = Reader::from_reader(body);
    let (mut found, mut inside) = (Vec::new(), None::<String>);
    loop {
        // Invalid XML ends the result. A listing then continues after the last name found.
        match reader.read_event() {
            Ok(Event::Start(start)) if start.local_name().as_ref() == name => {
                inside = Some(String::new());
            }
            Ok(Event::Text(text)) => {
                if let Some(inside) = &mut inside {
                    inside.push_str(&text);
                }
            }
            Ok(Event::GeneralRef(entity)) => {
                if let Some(inside) = &mut inside {
                    inside.push_str(&resolve(&entity));
                }
            }
            Ok(Event::End(end)) if end.local_name().as_ref() == name => {
                found.extend(inside.take());
            }
            Ok(Event::Eof) | Err(_) => return found,
            Ok(_) => {}
        }
    }
}

/// Text of the first element with this name.
pub(super) fn text(body: &[u8], name: &str) -> Option<String> {
    texts(body, name).into_iter().next()
}

fn resolve(entity: &quick_xml::events::BytesRef<'_>) -> String {
    if let Ok(Some(c)) = entity.resolve_char_ref() {
        return c.to_string();
    }
    match &**entity {
        "amp" => "&",
        "lt" => "<",
        "gt" => ">",
        "quot" => "\"",
        "apos" => "'",
        _ => "",
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_found_and_their_entities_resolved() {
        let body = b"<?xml version=\"1.0\"?><R xmlns=\"x\"><C><Key>a&amp;b&#47;c</Key></C><C><Key>d</Key></C></R>";
        assert_eq!(texts(body, "Key"), ["a&b/c", "d"]);
        assert_eq!(text(body, "Code"), None);
        assert_eq!(texts(b"no xml", "Key"), Vec::<String>::new());
    }
}
