use std::collections::BTreeSet;

use super::*;
use crate::ErrorKind;

fn parse(text: &str, environment: &[(&str, &str)]) -> Result<(Settings, StoreOptions)> {
    let environment: Vec<(String, String)> =
        environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let variable = move |name: &str| {
        let found = environment.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.clone())
    };
    Settings::parse_with(text, &["table"], Arc::new(variable))
}

fn plan(text: &str, environment: &[(&str, &str)]) -> ConnectPlan {
    plan_of(&parse(text, environment).expect(text).0)
}

fn plan_of(settings: &Settings) -> ConnectPlan {
    match settings.way().unwrap() {
        ConnectWay::Servers(plan) => *plan,
        ConnectWay::Dial(_) => panic!("no caller opens connections"),
    }
}

fn password(plan: &ConnectPlan, nth: usize) -> Option<String> {
    let config = plan.config(nth);
    config.get_password().map(|bytes| String::from_utf8(bytes.to_vec()).unwrap())
}

#[test]
fn the_text_comes_first_then_the_service_and_the_environment_fills_in() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("services");
    std::fs::write(&file, "[app]\nport=8\nuser=served\nsslmode=require\n").unwrap();
    let file = file.display().to_string();
    let environment = [
        ("PGHOST", "elsewhere"),
        ("PGPORT", "7"),
        ("PGUSER", "me"),
        ("PGDATABASE", "db"),
        ("PGCONNECT_TIMEOUT", "3"),
        ("PGSERVICEFILE", &file),
    ];
    let (settings, own) = parse("postgres://", &environment).unwrap();
    assert_eq!(settings.to_string(), "postgres://me@elsewhere:7/db");
    assert_eq!(plan_of(&settings).connect_timeout, Duration::from_secs(3));
    assert!(own.is_empty());

    let url = "postgresql://you:hunter2@a:1,b:2/x?table=s%2Et&connect_timeout=9";
    let (settings, own) = parse(url, &environment).unwrap();
    assert_eq!(settings.to_string(), "postgres://you@a:1,b:2/x");
    assert_eq!(own, [("table".to_owned(), "s.t".to_owned())]);
    let plan = plan_of(&settings);
    assert_eq!(
        (plan.connect_timeout, plan.wanted),
        (Duration::from_secs(9), WantedServer::Primary)
    );

    let (settings, _) = parse("service=app user=given", &environment).unwrap();
    assert_eq!(settings.to_string(), "postgres://given@elsewhere:8/db");
    assert_eq!(plan_of(&settings).trust.verify, Verify::Encrypt);
    // An empty value is a value: the environment does not replace it.
    let (settings, _) = parse("user=given port='' dbname=''", &environment).unwrap();
    assert_eq!(settings.to_string(), "postgres://given@elsewhere");
}

#[test]
fn services_are_found_in_the_files_of_the_user_and_of_the_system() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path(".pg_service.conf"), "[mine]\nhost=own\n").unwrap();
    std::fs::write(path("pg_service.conf"), "[mine]\nhost=hidden\n[ours]\nhost=shared\n").unwrap();
    let folder = folder.path().display().to_string();
    let environment = [("HOME", &*folder), ("PGSYSCONFDIR", &folder), ("PGUSER", "u")];
    for (service, shown) in [("mine", "postgres://u@own"), ("ours", "postgres://u@shared")] {
        let with_service: Vec<_> =
            environment.into_iter().chain([("PGSERVICE", service)]).collect();
        assert_eq!(parse("postgres://", &with_service).unwrap().0.to_string(), shown);
        let (settings, _) = parse(&format!("service={service}"), &environment).unwrap();
        assert_eq!(settings.to_string(), shown);
    }
    let error = parse("service=theirs", &environment).unwrap_err().to_string();
    assert!(error.contains("theirs"), "{error}");
    let missing = [("PGSERVICEFILE", "/nowhere/services")];
    let error = parse("service=mine", &missing).unwrap_err().to_string();
    assert!(error.contains("/nowhere/services"), "{error}");
}

#[test]
fn servers_are_named_by_lists() {
    let server = |host: &str, address: Option<&str>, port| PgServer {
        host: if host.starts_with(['/', '@']) {
            ServerHost::Socket(host.into())
        } else {
            ServerHost::Name(host.to_owned())
        },
        address: address.map(|address| address.parse().unwrap()),
        port,
    };
    for (text, servers) in [
        ("host=a,b port=1,2", vec![server("a", None, 1), server("b", None, 2)]),
        ("host=a,b port=3", vec![server("a", None, 3), server("b", None, 3)]),
        ("host=a,b port=,4", vec![server("a", None, 5432), server("b", None, 4)]),
        ("postgres://x/d?host=a,b&port=1,2", vec![server("a", None, 1), server("b", None, 2)]),
        ("hostaddr=127.0.0.1", vec![server("127.0.0.1", Some("127.0.0.1"), 5432)]),
        (
            "host=a,/tmp hostaddr=::1,",
            vec![server("a", Some("::1"), 5432), server("/tmp", None, 5432)],
        ),
        ("host=/tmp hostaddr=127.0.0.1", vec![server("127.0.0.1", Some("127.0.0.1"), 5432)]),
        ("host=@name,/run", vec![server("@name", None, 5432), server("/run", None, 5432)]),
    ] {
        assert_eq!(plan(text, &[]).servers, servers, "{text}");
    }
    for (text, part) in [
        ("host=a,b port=1,2,3", "3 ports"),
        ("host=a,b hostaddr=127.0.0.1", "hostaddr"),
        ("host=a hostaddr=b", "numeric"),
        ("host=a port=0", "port"),
        ("host=a port=65536", "port"),
    ] {
        let error = parse(text, &[]).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn modes_of_encryption_are_those_of_libpq() {
    for (query, verify) in [
        ("", Verify::Prefer),
        ("?sslmode=disable", Verify::Off),
        ("?sslmode=allow", Verify::Prefer),
        ("?sslmode=prefer", Verify::Prefer),
        ("?sslmode=require", Verify::Encrypt),
        ("?ssl=true", Verify::Encrypt),
        ("?sslmode=require&sslrootcert=/etc/passwd", Verify::Ca),
        ("?sslmode=require&sslrootcert=/no.such.file", Verify::Encrypt),
        ("?sslmode=verify-ca&sslrootcert=/r.crt", Verify::Ca),
        ("?sslmode=verify-full", Verify::Full),
        ("?sslrootcert=system", Verify::Full),
    ] {
        assert_eq!(plan(&format!("postgres://h/d{query}"), &[]).trust.verify, verify, "{query}");
    }
    let from = |name, value| plan("postgres://h/d", &[(name, value)]).trust.verify;
    assert_eq!(from("PGSSLMODE", "verify-full"), Verify::Full);
    assert_eq!(from("PGREQUIRESSL", "1"), Verify::Encrypt);
    let local = plan("postgres://%2Ftmp/d?sslmode=verify-full", &[]);
    assert_eq!(local.trust.verify, Verify::Off, "a Unix socket needs no encryption");
    let mixed = plan("host=/tmp,h sslmode=verify-full", &[]);
    assert_eq!((mixed.trust(0).verify, mixed.trust(1).verify), (Verify::Off, Verify::Full));
}

#[test]
fn versions_of_tls_are_bounded() {
    let count = |text: &str| plan(text, &[]).trust.versions.to_vec();
    let (v12, v13) = (&rustls::version::TLS12, &rustls::version::TLS13);
    assert_eq!(count("host=h"), [v13, v12]);
    assert_eq!(count("host=h ssl_min_protocol_version=TLSv1"), [v13, v12]);
    assert_eq!(count("host=h ssl_min_protocol_version=tlsv1.3"), [v13]);
    assert_eq!(count("host=h ssl_max_protocol_version=TLSv1.2"), [v12]);
}

#[test]
fn what_must_not_be_ignored_is_refused_with_its_reason() {
    for (text, part) in [
        ("host=h gssencmode=require", "gssencmode: GSSAPI"),
        ("host=h require_auth=scram-sha-256", "require_auth"),
        ("host=h replication=database", "replication"),
        ("host=h sslcertmode=require", "sslcertmode"),
        ("host=h sslrootcert=system sslmode=require", "verify-full"),
        ("host=h sslmode=verify-ca", "sslrootcert"),
        ("host=h ssl_max_protocol_version=TLSv1.1", "before 1.2"),
        ("host=h ssl_min_protocol_version=TLSv1.3 ssl_max_protocol_version=TLSv1.2", "above"),
        ("host=h ssl_min_protocol_version=TLSv2", "TLSv1.3"),
        ("host=h channel_binding=maybe", "require"),
        ("host=h target_session_attrs=read-only", "locks need a writable server"),
        ("host=h target_session_attrs=standby", "locks need a writable server"),
        ("host=h target_session_attrs=fastest", "prefer-standby"),
        ("host=h keepalives=on", "keepalives"),
    ] {
        let error = parse(text, &[]).expect_err(text);
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(part), "{text}: {error}");
    }
    for (name, value) in [("PGGSSENCMODE", "require"), ("PGREQUIREAUTH", "md5")] {
        assert!(parse("host=h", &[(name, value)]).is_err(), "{name}");
    }
    for text in
        ["gssencmode=prefer", "replication=off", "client_encoding=latin1", "sslcompression=1"]
    {
        plan(text, &[]);
    }
}

#[test]
fn requested_servers_and_times_reach_the_driver() {
    for (value, wanted) in [
        ("any", WantedServer::Primary),
        ("read-write", WantedServer::ReadWrite),
        ("primary", WantedServer::Primary),
        ("prefer-standby", WantedServer::Primary),
    ] {
        assert_eq!(plan(&format!("host=a,b target_session_attrs={value}"), &[]).wanted, wanted);
    }
    let text = "host=h connect_timeout=-1 keepalives_idle=' 3 ' keepalives_interval=4 keepalives_count=5 \
                tcp_user_timeout=1500 fallback_application_name=job channel_binding=require requirepeer=pg";
    let plan = plan(text, &[]);
    let config = plan.config(0);
    assert_eq!(plan.connect_timeout, CONNECT_TIMEOUT);
    assert_eq!(config.get_keepalives_idle(), Duration::from_secs(3));
    assert_eq!(config.get_keepalives_interval(), Some(Duration::from_secs(4)));
    assert_eq!(config.get_keepalives_retries(), Some(5));
    assert_eq!(config.get_tcp_user_timeout(), Some(&Duration::from_millis(1_500)));
    assert_eq!(config.get_application_name(), Some("job"));
    assert_eq!(config.get_channel_binding(), ChannelBinding::Require);
    assert_eq!(plan.required_peer.as_deref(), Some("pg"));
}

#[test]
fn invalid_settings_are_refused_without_a_secret() {
    for (url, part) in [
        ("postgres://u:hunter2@h/d?sslmode=hunter2", "sslmode"),
        ("postgres://u:hunter2@h:x/d", "port"),
        ("postgres://u:hunter2@h/d?connect_timeout=soon", "connect_timeout"),
        ("postgres://u:hunter2@h/d?target_session_attrs=standby", "read-write"),
        ("postgres://u:hunter2@h/d?sslcert=/etc/passwd", "sslkey"),
        ("postgres://u:hunter2@h/d?table=%zz", "table"),
        ("postgres:u:hunter2", "postgres://"),
    ] {
        let error = parse(url, &[]).expect_err(url);
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let text = format!("{error} {error:?}");
        assert!(text.contains(part), "{url}: {text}");
        assert!(!text.to_lowercase().contains("hunter2"), "{text}");
    }
}

#[test]
fn an_unknown_option_is_named_alone() {
    for text in [
        "postgres://u:hunter2@h/d?sslmode=require&colour=hunter2&table=t",
        "host=h password=hunter2 colour=hunter2 sslmode=require",
    ] {
        let error = parse(text, &[]).unwrap_err().to_string();
        assert_eq!(error, "postgres: unknown option \"colour\" in the connection settings");
    }
    let error = parse("postgres://h/d?Hunter2=x", &[]).unwrap_err().to_string();
    assert!(!error.contains("unter2"), "{error}");
}

#[test]
fn every_keyword_is_listed_once() {
    let names: BTreeSet<_> = keywords::KEYWORDS.iter().map(|keyword| keyword.name).collect();
    assert_eq!(names.len(), keywords::KEYWORDS.len());
}

#[test]
fn a_password_that_is_not_written_as_it_should_be_is_not_shown_either() {
    for url in
        ["postgres://u:p?HUNTER2@h/d", "postgres://u:1/HUNTER2@h/d", "postgres://u:HUNTER2/x@h/d"]
    {
        let shown = match parse(url, &[]) {
            Ok((settings, _)) => format!("{settings} {settings:?}"),
            Err(error) => format!("{error} {error:?}"),
        };
        assert!(!shown.contains("HUNTER2"), "{shown}");
    }
}

#[test]
fn passwords_are_not_shown() {
    let (settings, _) = parse("postgres://u:hunter2@h/d?password=hunter2", &[]).unwrap();
    assert!(!format!("{settings} {settings:?}").contains("hunter2"));
    assert_eq!(password(&plan_of(&settings), 0).as_deref(), Some("hunter2"));
}

#[cfg(unix)]
#[test]
fn a_passfile_is_read_at_every_connect_unless_other_users_may_read_it() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pgpass");
    let write = |text: &str, mode: u32| {
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    write("a:*:*:u:first\nb:5432:*:u:hunter2\n", 0o644);
    let file = path.display().to_string();
    let (settings, _) = parse("postgres://u@a,b/d", &[("PGPASSFILE", &*file)]).unwrap();
    assert_eq!(password(&plan_of(&settings), 0), None, "other users may read it");
    let state = RandomState::new();
    let fingerprint = || settings.way().unwrap().fingerprint(&state);
    let before = fingerprint();
    write("a:*:*:u:first\nb:5432:*:u:hunter2\n", 0o600);
    let plan = plan_of(&settings);
    assert_eq!(password(&plan, 0).as_deref(), Some("first"));
    assert_eq!(password(&plan, 1).as_deref(), Some("hunter2"));
    assert_ne!(fingerprint(), before);
    let before = fingerprint();
    write("a:*:*:u:first\nb:5432:*:u:hunter3\n", 0o600);
    assert_eq!(password(&plan_of(&settings), 1).as_deref(), Some("hunter3"));
    assert_ne!(fingerprint(), before);
    let before = fingerprint();
    assert_eq!(fingerprint(), before);
}
