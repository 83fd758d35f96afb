use super::*;
use crate::ErrorKind;

fn parse(url: &str, environment: &[(&str, &str)]) -> Result<(Settings, StoreOptions)> {
    let variable = |name: &str| {
        let found = environment.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    Settings::parse_with(url, &["table"], &variable)
}

#[test]
fn the_url_comes_first_and_the_environment_fills_in() {
    let environment = [
        ("PGHOST", "elsewhere"),
        ("PGPORT", "7"),
        ("PGUSER", "me"),
        ("PGDATABASE", "db"),
        ("PGCONNECT_TIMEOUT", "3"),
    ];
    let (settings, own) = parse("postgres://", &environment).unwrap();
    assert_eq!(settings.to_string(), "postgres://me@elsewhere:7/db");
    assert_eq!(settings.connect_timeout, Duration::from_secs(3));
    assert!(own.is_empty());

    let url = "postgresql://you:hunter2@a:1,b:2/x?table=s%2Et&connect_timeout=9";
    let (settings, own) = parse(url, &environment).unwrap();
    assert_eq!(settings.to_string(), "postgres://you@a:1,b:2/x");
    assert_eq!(settings.connect_timeout, Duration::from_secs(9));
    assert_eq!(own, [("table".to_owned(), "s.t".to_owned())]);
    assert_eq!(settings.config.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
}

#[test]
fn modes_of_encryption_are_those_of_libpq() {
    for (query, verify) in [
        ("", Verify::Prefer),
        ("?sslmode=disable", Verify::Off),
        ("?sslmode=allow", Verify::Prefer),
        ("?sslmode=prefer", Verify::Prefer),
        ("?sslmode=require", Verify::Encrypt),
        ("?sslmode=require&sslrootcert=/r.crt", Verify::Ca),
        ("?sslmode=verify-ca", Verify::Ca),
        ("?sslmode=verify-full", Verify::Full),
        ("?sslrootcert=system", Verify::Full),
    ] {
        let (settings, _) = parse(&format!("postgres://h/d{query}"), &[]).unwrap();
        assert_eq!(settings.trust.verify, verify, "{query}");
    }
    let (settings, _) = parse("postgres://h/d", &[("PGSSLMODE", "verify-full")]).unwrap();
    assert_eq!(settings.trust.verify, Verify::Full);
    let (local, _) = parse("postgres://%2Ftmp/d?sslmode=verify-full", &[]).unwrap();
    assert_eq!(local.trust.verify, Verify::Off, "a Unix socket needs no encryption");
}

#[test]
fn invalid_urls_are_refused_without_a_secret() {
    for (url, part) in [
        ("postgres://u:hunter2@h/d?sslmode=hunter2", "sslmode"),
        ("postgres://u:hunter2@h:x/d", "cannot be read"),
        ("postgres://u:hunter2@h/d?colour=hunter2", "colour"),
        ("postgres://u:hunter2@h/d?connect_timeout=soon", "connect_timeout"),
        ("postgres://u:hunter2@h/d?target_session_attrs=standby", "read-write"),
        ("postgres://u:hunter2@h/d?sslcert=/hunter.crt", "sslkey"),
        ("postgres://u:hunter2@h/d?table=%zz", "table"),
    ] {
        let error = parse(url, &[]).expect_err(url);
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let text = format!("{error} {error:?}");
        assert!(text.contains(part), "{url}: {text}");
        assert!(!text.to_lowercase().contains("hunter2"), "{text}");
    }
}

#[test]
fn a_password_that_is_not_written_as_it_should_be_is_not_shown_either() {
    let shown = match parse("postgres://u:p?HUNTER2@h/d", &[]) {
        Ok((settings, _)) => format!("{settings} {settings:?}"),
        Err(error) => format!("{error} {error:?}"),
    };
    assert!(!shown.contains("HUNTER2"), "{shown}");
}

#[test]
fn passwords_are_not_shown() {
    let (settings, _) = parse("postgres://u:hunter2@h/d?password=hunter2", &[]).unwrap();
    assert!(!format!("{settings} {settings:?} {:?}", settings.config).contains("hunter2"));
    assert_eq!(settings.config.get_password(), Some(&b"hunter2"[..]));
}

#[test]
fn lines_of_a_passfile_match_as_they_are_written() {
    let wanted = ["h", "5432", "db", "u:1"];
    assert_eq!(matching(r"h:5432:db:u\:1:a\\b:c", wanted).as_deref(), Some(r"a\b:c"));
    assert_eq!(matching("*:*:*:*:x", wanted).as_deref(), Some("x"));
    for line in ["#h:5432:db:u\\:1:x", "h:5433:db:*:x", "h:5432:db", ""] {
        assert_eq!(matching(line, wanted), None, "{line:?}");
    }
}

#[cfg(unix)]
#[test]
fn a_passfile_that_others_may_read_is_not_used() {
    use std::os::unix::fs::PermissionsExt as _;
    let path = std::env::temp_dir().join(format!("tenure-pgpass-{}", std::process::id()));
    std::fs::write(&path, "other:*:*:*:no\nh:5432:*:u:hunter2\n").unwrap();
    let file = path.display().to_string();
    let environment = [("PGPASSFILE", &*file)];
    for (mode, password) in [(0o644, None), (0o600, Some(&b"hunter2"[..]))] {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        let (settings, _) = parse("postgres://u@h/d", &environment).unwrap();
        assert_eq!(settings.config.get_password(), password, "{mode:o}");
    }
    std::fs::remove_file(&path).unwrap();
}
