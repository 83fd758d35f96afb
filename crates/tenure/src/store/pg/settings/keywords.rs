//! The keywords of libpq, and the effect of each.

use self::KeywordEffect::{Honoured, Ignored, RefusedUnless};

/// A keyword of libpq.
pub(super) struct Keyword {
    pub(super) name: &'static str,
    /// Variable of the environment that fills in the value.
    pub(super) variable: Option<&'static str>,
    pub(super) effect: KeywordEffect,
}

/// Effect of a keyword.
#[derive(Clone, Copy)]
pub(super) enum KeywordEffect {
    Honoured,
    /// No effect, for this reason. Ignoring the keyword must make no connection less safe.
    Ignored(&'static str),
    /// Accepted with these values, and refused with any other one, for this reason.
    RefusedUnless(&'static [&'static str], &'static str),
}

/// Finds a keyword by its name.
pub(super) fn find(name: &str) -> Option<&'static Keyword> {
    KEYWORDS.iter().find(|keyword| keyword.name == name)
}

const fn keyword(
    name: &'static str,
    variable: Option<&'static str>,
    effect: KeywordEffect,
) -> Keyword {
    Keyword { name, variable, effect }
}

/// All keywords of PostgreSQL 15's libpq, and those of later versions that a shared setting may contain.
pub(super) const KEYWORDS: &[Keyword] = &[
    keyword("application_name", Some("PGAPPNAME"), Honoured),
    keyword("channel_binding", Some("PGCHANNELBINDING"), Honoured),
    keyword("client_encoding", Some("PGCLIENTENCODING"), Ignored("the driver always uses UTF-8")),
    keyword("connect_timeout", Some("PGCONNECT_TIMEOUT"), Honoured),
    keyword("dbname", Some("PGDATABASE"), Honoured),
    keyword("fallback_application_name", None, Honoured),
    keyword("gssdelegation", Some("PGGSSDELEGATION"), Ignored(NO_GSSAPI)),
    keyword(
        "gssencmode",
        Some("PGGSSENCMODE"),
        RefusedUnless(&["disable", "prefer"], "GSSAPI encryption is not supported: use sslmode"),
    ),
    keyword("gsslib", Some("PGGSSLIB"), Ignored(NO_GSSAPI)),
    keyword("host", Some("PGHOST"), Honoured),
    keyword("hostaddr", Some("PGHOSTADDR"), Honoured),
    keyword("keepalives", None, Honoured),
    keyword("keepalives_count", None, Honoured),
    keyword("keepalives_idle", None, Honoured),
    keyword("keepalives_interval", None, Honoured),
    keyword("krbsrvname", Some("PGKRBSRVNAME"), Ignored(NO_GSSAPI)),
    keyword(
        "load_balance_hosts",
        Some("PGLOADBALANCEHOSTS"),
        Ignored("all participants must use the same server: the writable one"),
    ),
    keyword("options", Some("PGOPTIONS"), Honoured),
    keyword("passfile", Some("PGPASSFILE"), Honoured),
    keyword("password", Some("PGPASSWORD"), Honoured),
    keyword("port", Some("PGPORT"), Honoured),
    keyword(
        "replication",
        None,
        RefusedUnless(&["false", "off", "no", "0"], "a replication connection has no locks"),
    ),
    keyword(
        "require_auth",
        Some("PGREQUIREAUTH"),
        RefusedUnless(&[], "the driver cannot restrict the server's choice of authentication"),
    ),
    keyword("requirepeer", Some("PGREQUIREPEER"), Honoured),
    keyword("service", Some("PGSERVICE"), Honoured),
    keyword("ssl_max_protocol_version", Some("PGSSLMAXPROTOCOLVERSION"), Honoured),
    keyword("ssl_min_protocol_version", Some("PGSSLMINPROTOCOLVERSION"), Honoured),
    keyword("sslcert", Some("PGSSLCERT"), Honoured),
    keyword("sslcertmode", Some("PGSSLCERTMODE"), Honoured),
    keyword(
        "sslcompression",
        Some("PGSSLCOMPRESSION"),
        Ignored("TLS compression is unsafe, and current servers do not offer it"),
    ),
    keyword("sslcrl", Some("PGSSLCRL"), Honoured),
    keyword("sslcrldir", Some("PGSSLCRLDIR"), Honoured),
    keyword("sslkey", Some("PGSSLKEY"), Honoured),
    keyword("sslmode", Some("PGSSLMODE"), Honoured),
    keyword(
        "sslnegotiation",
        Some("PGSSLNEGOTIATION"),
        Ignored("it saves a round trip, and servers accept both ways"),
    ),
    keyword(
        "sslpassword",
        None,
        Ignored("encrypted keys are not supported: a key that needs the password is refused"),
    ),
    keyword("sslrootcert", Some("PGSSLROOTCERT"), Honoured),
    keyword("sslsni", Some("PGSSLSNI"), Honoured),
    keyword("target_session_attrs", Some("PGTARGETSESSIONATTRS"), Honoured),
    keyword("tcp_user_timeout", None, Honoured),
    keyword("user", Some("PGUSER"), Honoured),
];

const NO_GSSAPI: &str = "GSSAPI is not supported: a server that requires it is refused";
