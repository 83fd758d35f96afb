//! Connection strings, compared with psql: both connect to the same database as the same role, or neither connects.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tenure::{Client, PgAdvisoryStore};
use tokio_postgres::NoTls;

use crate::encryption::Authority;
use crate::server::{Server, free_port};
use crate::services;

/// Password of the role `app`, with all that needs an escape somewhere.
const PASSWORD: &str = r"p@ss w:r\d's";

/// Connection strings of one environment.
struct Case {
    environment: Vec<(&'static str, String)>,
    texts: Vec<String>,
}

/// Two servers, one without and one with TLS, and the files that connection strings name.
struct Place {
    plain: Server,
    tls: Server,
    /// Port that refuses connections.
    closed: u16,
}

impl Place {
    fn new() -> Option<Self> {
        let (plain, mut tls) = (Server::start()?, Server::start()?);
        let access = "local all all trust\nhost all app 127.0.0.1/32 scram-sha-256\n\
                      host all all 127.0.0.1/32 trust\n";
        plain.write("pg_hba.conf", access);
        plain.sql("SELECT pg_reload_conf()");
        let (ours, other) = (Authority::new(), Authority::new());
        let (certificate, key) = ours.sign_numbered("localhost", 7);
        tls.down();
        tls.write("server.crt", &certificate);
        tls.write("server.key", &key);
        tls.write("postgresql.auto.conf", "ssl = on\n");
        let access = format!("hostssl all plain 127.0.0.1/32 reject\n{access}");
        tls.write("pg_hba.conf", &access);
        tls.up();
        let quoted = PASSWORD.replace('\'', "''");
        let user = String::from_utf8(Command::new("id").arg("-un").output().unwrap().stdout);
        let user = user.unwrap().trim().to_owned();
        for server in [&plain, &tls] {
            server.sql(&format!("CREATE ROLE app SUPERUSER LOGIN PASSWORD '{quoted}'"));
            if user != "postgres" {
                server.sql(&format!("CREATE ROLE \"{user}\" SUPERUSER LOGIN"));
            }
            server.sql("CREATE DATABASE app");
            server.sql("CREATE ROLE plain LOGIN");
        }
        let place = Self { plain, tls, closed: free_port() };
        place.write("root.crt", &ours.certificate);
        place.write("other.crt", &other.certificate);
        place.write("none.crl", &ours.revocations(&[]));
        place.write("revoked.crl", &ours.revocations(&[7]));
        place.write_credentials();
        place.write_revocations(&ours);
        Some(place)
    }

    /// Folders of lists of revoked certificates, with the names that OpenSSL looks for.
    fn write_revocations(&self, authority: &Authority) {
        for (folder, serials) in [("none", &[][..]), ("revoked", &[7])] {
            let file = self.path(&format!("{folder}.crl"));
            let mut openssl = Command::new("openssl");
            let output = openssl.args(["crl", "-hash", "-noout", "-in", &file]).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let hash = String::from_utf8(output.stdout).unwrap();
            let list = authority.revocations(serials);
            self.write(&format!("lists/{folder}/{}.r0", hash.trim()), &list);
        }
        fs::create_dir_all(self.path("lists/empty")).unwrap();
    }

    fn write_credentials(&self) {
        let port = self.plain.port;
        // The password ends at a colon that is not escaped.
        let escaped = PASSWORD.replace('\\', r"\\").replace(':', r"\:");
        let lines =
            format!("#comment\nlocalhost:*:*:app:wrong\n127.0.0.1:{port}:*:app:{escaped}:rest\n");
        self.write("home/.pgpass", &lines);
        self.write("unescaped", &format!("*:*:*:*:{PASSWORD}\n"));
        self.write("readable", &lines);
        let readable = fs::Permissions::from_mode(0o644);
        fs::set_permissions(self.path("readable"), readable).unwrap();
        let services = format!(
            "[one]\nhost=127.0.0.1\nport={port}\nuser=postgres\nuser=ignored\n# comment\n[two]\nhost = 127.0.0.1\n\
             [three]\nservice=one\n[four]\ncolour=red\n[five]\nhost=127.0.0.1,127.0.0.1\nport={},{port}\nuser=app\n",
            self.closed
        );
        self.write("home/.pg_service.conf", &services);
        let system = format!("[one]\nport=1\n[six]\nhost=127.0.0.1\nport={port}\nuser=postgres\n");
        self.write("system/pg_service.conf", &system);
    }

    fn path(&self, name: &str) -> String {
        self.plain.folder().join("files").join(name).display().to_string()
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(Path::new(&path).parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    }

    /// Fills in the places of `<…>`.
    fn fill(&self, text: &str) -> String {
        let socket = self.plain.folder().display().to_string();
        let user = fs::metadata(self.plain.folder()).unwrap().uid();
        let users = fs::read_to_string("/etc/passwd").unwrap();
        let owner = users.lines().find(|line| line.split(':').nth(2) == Some(&user.to_string()));
        text.replace("<a>", &self.plain.port.to_string())
            .replace("<tls>", &self.tls.port.to_string())
            .replace("<closed>", &self.closed.to_string())
            .replace("<socket>", &socket)
            .replace("<%socket>", &socket.replace('/', "%2F"))
            .replace("<owner>", owner.unwrap().split(':').next().unwrap())
            .replace("<files>/", &self.path(""))
    }

    fn case(&self, environment: &[(&'static str, &str)], texts: &[&str]) -> Case {
        let environment = environment.iter().map(|(name, value)| (*name, self.fill(value)));
        Case {
            environment: environment.collect(),
            texts: texts.iter().map(|it| self.fill(it)).collect(),
        }
    }

    /// A program with this environment and no other settings of PostgreSQL.
    fn command(&self, program: &Path, case: &Case) -> Command {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("PG") {
                command.env_remove(name);
            }
        }
        command.env("HOME", self.path("no-home")).env("PGCONNECT_TIMEOUT", "20");
        command.envs(case.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null());
        command
    }

    /// Role, database and port as psql finds them; `None` if it does not connect.
    fn psql(&self, case: &Case, text: &str) -> Option<String> {
        let psql = services::postgres_programs().unwrap().join("psql");
        let query =
            "SELECT concat_ws(' ', current_user, current_database(), current_setting('port'))";
        let mut psql = self.command(&psql, case);
        let output = psql.args(["-XAtqw", "-d", text, "-c", query]).output().unwrap();
        let found = String::from_utf8(output.stdout).unwrap().trim().to_owned();
        output.status.success().then_some(found)
    }

    /// The same as this library finds them, or its error, for each text.
    fn ours(&self, case: &Case) -> Vec<Result<String, String>> {
        let mut worker = self.command(&std::env::current_exe().unwrap(), case);
        worker.args(["--exact", "conninfo::worker", "--nocapture"]);
        worker.env(TEXTS, serde_json::to_string(&case.texts).unwrap());
        let servers = [&self.plain, &self.tls].map(|server| (server.port, server.url()));
        worker.env(SERVERS, serde_json::to_string(&BTreeMap::from(servers)).unwrap());
        let output = worker.output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let answer = said.lines().find_map(|line| line.strip_prefix(ANSWER));
        let errors = String::from_utf8_lossy(&output.stderr);
        serde_json::from_str(answer.unwrap_or_else(|| panic!("{said} {errors}"))).unwrap()
    }

    /// Compares all texts; returns the number of those that connect.
    fn compare(&self, case: &Case) -> usize {
        let mut connected = 0;
        let ours = self.ours(case);
        assert_eq!(ours.len(), case.texts.len());
        for (text, ours) in case.texts.iter().zip(ours) {
            let theirs = self.psql(case, text);
            assert_eq!(
                ours.as_ref().ok(),
                theirs.as_ref(),
                "{text} {:?}: {ours:?}",
                case.environment
            );
            connected += usize::from(ours.is_ok());
        }
        connected
    }
}

const TEXTS: &str = "TENURE_TEST_CONNINFO";
const SERVERS: &str = "TENURE_TEST_SERVERS";
const ANSWER: &str = "answer: ";

/// No test by itself: the process that connects with the environment of a case.
#[tokio::test(flavor = "multi_thread")]
async fn worker() {
    let Ok(texts) = std::env::var(TEXTS) else { return };
    let texts: Vec<String> = serde_json::from_str(&texts).unwrap();
    let servers: BTreeMap<u16, String> =
        serde_json::from_str(&std::env::var(SERVERS).unwrap()).unwrap();
    let mut admins = Vec::new();
    for (port, url) in servers {
        let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
        tokio::spawn(connection);
        admins.push((port, client));
    }
    let mut answers: Vec<Result<String, String>> = Vec::new();
    for (at, text) in texts.iter().enumerate() {
        let held = async {
            let client = Client::with_store(Arc::new(PgAdvisoryStore::open(text)?));
            let lock = client.lock(format!("77,{at}")).ttl(Duration::from_secs(60));
            Ok::<_, tenure::Error>((lock.try_acquire().await?, client))
        };
        let (guard, client) = match held.await {
            Ok(held) => held,
            Err(error) => {
                answers.push(Err(error.chain()));
                continue;
            }
        };
        let query = format!(
            "SELECT usename || ' ' || datname FROM pg_locks JOIN pg_stat_activity USING (pid) \
             WHERE locktype = 'advisory' AND granted AND classid = 77 AND objid = {at}"
        );
        let mut found = Vec::new();
        for (port, admin) in &admins {
            let rows = admin.query(&query, &[]).await.unwrap();
            found.extend(rows.iter().map(|row| format!("{} {port}", row.get::<_, String>(0))));
        }
        answers.push(Ok(found.join(", ")));
        guard.release().await.unwrap();
        drop(client);
    }
    println!("\n{ANSWER}{}", serde_json::to_string(&answers).unwrap());
}

const PAIRS: &[&str] = &[
    "host=127.0.0.1 port=<a> user=postgres dbname=app",
    "host=127.0.0.1 port=<a> user=postgres",
    "host=127.0.0.1 port=<a> dbname=postgres",
    r"host=127.0.0.1 port=<a> user=app password='p@ss w:r\\d\'s'",
    r" host = '127.0.0.1'	port=<a>  user=app password=p@ss\ w:r\\d's ",
    "user='app'host=127.0.0.1 port=<a>",
    "host=127.0.0.1 port=<a> user='' dbname=postgres",
    "host=127.0.0.1 port=<a> port=<closed> user=postgres",
    "host=127.0.0.1 port=<closed> port=<a> user=postgres",
    "host=127.0.0.1,127.0.0.1 port=<closed>,<a> user=postgres",
    "host=127.0.0.1,127.0.0.1 port=<a> user=postgres",
    "host=127.0.0.1,127.0.0.1 port=<a>,<a>,<a> user=postgres",
    "host=127.0.0.1 port=<closed>,<a> user=postgres",
    "host=127.0.0.1 port=0 user=postgres",
    "host=127.0.0.1 port=x user=postgres",
    "host=127.0.0.1 port=' <a> ' user=postgres",
    "hostaddr=127.0.0.1 port=<a> user=postgres",
    "host=no.such.example hostaddr=127.0.0.1 port=<a> user=postgres",
    "host=a,b hostaddr=127.0.0.1 port=<a> user=postgres",
    "host=a,b hostaddr=127.0.0.1,127.0.0.1 port=<closed>,<a> user=postgres",
    "hostaddr=localhost port=<a> user=postgres",
    "host=<socket> port=<a> user=postgres",
    "host=<socket>,127.0.0.1 port=<closed>,<a> user=postgres",
    "host=@<socket> port=<a> user=postgres",
    "host=@<socket> port=<closed> user=postgres",
    "host=@no-such-socket port=<a> user=postgres",
    "host=@no-such-socket,@<socket> port=<a> user=postgres",
    "host=@<socket> port=<a> user=postgres sslmode=verify-full",
    "host=@<socket> port=<a> user=postgres requirepeer=<owner>",
    "host=@<socket> port=<a> user=postgres requirepeer=no_such_user",
    "host=@<socket> hostaddr=127.0.0.1 port=<a> user=postgres",
    "host=127.0.0.1 port=<a> user=postgres colour=red",
    "host=127.0.0.1 port=<a> user=postgres =x",
    "host=127.0.0.1 port=<a> user=postgres dbname",
    "host=127.0.0.1 port=<a> user='postgres",
    "HOST=127.0.0.1 port=<a> user=postgres",
    "host=127.0.0.1 port=<a> user=nobody",
    "host=127.0.0.1 port=<a> user=app password=wrong",
    "host=127.0.0.1 port=<a> user=app",
];

const OPTIONS: &[&str] = &[
    "target_session_attrs=any",
    "target_session_attrs=read-write",
    "target_session_attrs=primary",
    "target_session_attrs=prefer-standby",
    "target_session_attrs=read-only",
    "target_session_attrs=standby",
    "target_session_attrs=fastest",
    "options='-c search_path=pg_catalog'",
    "options='-c no_such_setting=1'",
    "connect_timeout=7",
    "connect_timeout=soon",
    "keepalives=0",
    "keepalives=x",
    "keepalives_idle=10 keepalives_interval=2 keepalives_count=3",
    "tcp_user_timeout=1000",
    "sslmode=disable",
    "sslmode=allow",
    "sslmode=prefer",
    "sslmode=require",
    "sslmode=verify-ca",
    "sslmode=bogus",
    "ssl_min_protocol_version=TLSv1.3",
    "ssl_min_protocol_version=tlsv1.2",
    "ssl_min_protocol_version=bogus",
    "ssl_min_protocol_version=TLSv1.3 ssl_max_protocol_version=TLSv1.2",
    "gssencmode=disable",
    "gssencmode=prefer",
    "gssencmode=require",
    "gssencmode=bogus",
    "channel_binding=disable",
    "channel_binding=prefer",
    "channel_binding=require",
    "channel_binding=bogus",
    "requirepeer=no_such_user",
    "replication=off",
    "client_encoding=UTF8",
    "application_name=x fallback_application_name=y",
    "sslcompression=0 krbsrvname=x gsslib=gssapi sslsni=0 sslpassword=x",
    "sslrootcert=<files>/root.crt sslcrl=<files>/none.crl",
    "authtype=x",
    "tty=x",
    "requiressl=1",
];

const URLS: &[&str] = &[
    "postgresql://postgres@127.0.0.1:<a>/app",
    "postgres://postgres@127.0.0.1:<a>",
    "postgres://app:p%40ss%20w%3Ar%5Cd's@127.0.0.1:<a>/postgres",
    "postgres://app:p%40ss w:r\\d's@127.0.0.1:<a>/postgres",
    "postgres://app@127.0.0.1:<a>/postgres?password=p%40ss%20w:r%5Cd's",
    "postgres://postgres@127.0.0.1:<closed>,127.0.0.1:<a>/app",
    "postgres://postgres@127.0.0.1,127.0.0.1:<a>/app?port=<a>",
    "postgres:///app?host=127.0.0.1&port=<a>&user=postgres",
    "postgres://?host=127.0.0.1,127.0.0.1&port=<closed>,<a>&user=postgres",
    "postgres://no.such.example/app?host=127.0.0.1&port=<a>&user=postgres",
    "postgres://no.such.example:<a>/app?hostaddr=127.0.0.1&user=postgres",
    "postgres://postgres@<%socket>:<a>/app",
    "postgres://postgres@:<a>/app?host=<%socket>",
    "postgres://postgres@%40<%socket>:<a>/app",
    "postgres:///app?host=@<socket>&port=<a>&user=postgres",
    "postgres://postgres@[::1]:<closed>,127.0.0.1:<a>/app",
    "postgres://postgres@127.0.0.1:<a>/app?",
    "postgres://postgres@127.0.0.1:<a>/app?application_name=x&",
    "postgres://postgres@127.0.0.1:<a>/app?colour=red",
    "postgres://postgres@127.0.0.1:<a>/app?sslmode",
    "postgres://postgres@127.0.0.1:<a>/app?sslmode=prefer=x",
    "postgres://postgres@127.0.0.1:<a>/app?application_name=%zz",
    "postgres://postgres@127.0.0.1:<a>/app?application_name=%00",
    "postgres://postgres@127.0.0.1:<a>/app?ssl=true",
    "postgres://postgres@127.0.0.1:<a>/app?%73slmode=require",
    "postgres://postgres@[::1:<a>/app",
    "postgres://postgres@[]:<a>/app",
    "postgres://postgres@127.0.0.1:<a>x/app",
    "postgres://postgres@127.0.0.1:<a>/nowhere",
];

const ENCRYPTED: &[&str] = &[
    "sslmode=disable",
    "sslmode=require",
    "sslmode=require sslrootcert=<files>/other.crt",
    "sslmode=verify-ca sslrootcert=<files>/root.crt",
    "sslmode=verify-ca sslrootcert=<files>/other.crt",
    "sslmode=verify-full sslrootcert=<files>/root.crt",
    "sslmode=verify-full sslrootcert=<files>/root.crt host=localhost hostaddr=127.0.0.1",
    "sslmode=verify-ca sslrootcert=<files>/root.crt sslcrl=<files>/none.crl",
    "sslmode=verify-ca sslrootcert=<files>/root.crt sslcrl=<files>/revoked.crl",
    "sslmode=require sslcrl=<files>/revoked.crl",
    "sslmode=verify-ca sslrootcert=<files>/root.crt sslcrldir=<files>/lists/none",
    "sslmode=verify-ca sslrootcert=<files>/root.crt sslcrldir=<files>/lists/revoked",
    "sslmode=verify-full sslrootcert=<files>/root.crt sslcrldir=<files>/lists/revoked host=localhost",
    "sslmode=verify-ca sslrootcert=<files>/root.crt sslcrldir=<files>/lists/empty",
    "sslmode=verify-ca sslrootcert=<files>/root.crt sslcrldir=<files>/lists/missing",
    "sslmode=require sslrootcert=<files>/root.crt sslcrldir=<files>/lists/revoked",
    "sslmode=require sslcrldir=<files>/lists/revoked",
    "sslmode=require sslcrldir=<files>/lists/missing",
    "sslmode=require ssl_min_protocol_version=TLSv1.3",
    "sslmode=require ssl_max_protocol_version=TLSv1.2",
    "sslmode=require sslsni=0",
    "sslmode=require channel_binding=require",
    "sslmode=require channel_binding=disable",
    "user=postgres sslmode=require channel_binding=require",
    "sslmode=require sslrootcert=<files>/missing.crt",
    "sslmode=verify-ca sslrootcert=<files>/missing.crt",
    "sslmode=verify-full sslrootcert=<files>/missing.crt",
    "sslmode=require sslkey=<files>/missing.key",
    "sslmode=require sslcert=<files>/missing.crt",
    "sslmode=require sslcert=<files>/missing.crt sslkey=<files>/missing.key",
    "sslmode=require sslcert=<files>/root.crt",
    "sslmode=require sslcert=<files>/root.crt sslkey=<files>/missing.key",
    // The access rules accept this role only without encryption.
    "user=plain",
    "user=plain sslmode=prefer",
    "user=plain sslmode=allow",
    "user=plain sslmode=require",
    "user=plain sslmode=disable",
    "user=app sslmode=prefer password=wrong",
];

#[test]
fn psql_and_this_library_read_connection_strings_alike() {
    let Some(place) = Place::new() else { return };
    let mut connected = place.compare(&place.case(&[], PAIRS));
    let with_options = |server: &str, options: &[&str]| -> Vec<String> {
        options.iter().map(|option| format!("{server} {option}")).collect()
    };
    let options = with_options("host=127.0.0.1 port=<a> user=postgres", OPTIONS);
    let texts: Vec<_> = options.iter().map(String::as_str).collect();
    connected += place.compare(&place.case(&[], &texts));
    connected += place.compare(&place.case(&[], URLS));
    let server = "host=127.0.0.1 port=<tls> user=app password='p@ss w:r\\\\d\\'s' dbname=app";
    let options = with_options(server, ENCRYPTED);
    let texts: Vec<_> = options.iter().map(String::as_str).collect();
    connected += place.compare(&place.case(&[], &texts));
    let socket = "host=<socket> port=<a> user=postgres";
    let options = with_options(
        socket,
        &["requirepeer=<owner>", "requirepeer=no_such_user", "sslmode=verify-full"],
    );
    let texts: Vec<_> = options.iter().map(String::as_str).collect();
    connected += place.compare(&place.case(&[], &texts));
    assert!(connected > 60, "only {connected} connected: the comparison shows little");
}

#[test]
fn psql_and_this_library_read_the_environment_and_its_files_alike() {
    let Some(place) = Place::new() else { return };
    let server = &[("PGHOST", "127.0.0.1"), ("PGPORT", "<a>"), ("PGUSER", "postgres")][..];
    let with = |more: &[(&'static str, &'static str)]| [server, more].concat();
    let mut connected = 0;
    for (environment, texts) in [
        (
            with(&[("PGDATABASE", "app")]),
            &[
                "postgres://",
                "user=app",
                "dbname=postgres",
                "port=",
                "port=<closed>",
                "user=''",
                "dbname=''",
                "postgres://postgres@/postgres",
                "host=127.0.0.1,127.0.0.1",
            ][..],
        ),
        (with(&[("PGHOST", "127.0.0.1,127.0.0.1"), ("PGPORT", "<closed>,<a>")]), &["postgres://"]),
        (with(&[("PGHOST", "no.such.example"), ("PGHOSTADDR", "127.0.0.1")]), &["postgres://"]),
        (with(&[("PGUSER", "app"), ("PGPASSWORD", PASSWORD)]), &["postgres://", "password=wrong"]),
        (
            with(&[("PGUSER", "app"), ("HOME", "<files>/home")]),
            &["postgres://", "host=localhost hostaddr=127.0.0.1", "passfile=<files>/unescaped"],
        ),
        (
            with(&[("PGUSER", "app"), ("PGPASSFILE", "<files>/home/.pgpass")]),
            &[
                "postgres://",
                "passfile=<files>/readable",
                "passfile=<files>/missing",
                "password=''",
            ],
        ),
        (with(&[("PGSSLMODE", "require")]), &["postgres://", "sslmode=prefer"]),
        (with(&[("PGREQUIRESSL", "1")]), &["postgres://", "sslmode=prefer"]),
        (with(&[("PGCHANNELBINDING", "require")]), &["postgres://"]),
        (with(&[("PGGSSENCMODE", "require")]), &["postgres://", "gssencmode=disable"]),
        (with(&[("PGTARGETSESSIONATTRS", "read-only")]), &["postgres://"]),
        (with(&[("PGREQUIREPEER", "no_such_user")]), &["postgres://", "host=<socket>"]),
        (with(&[("PGOPTIONS", "-c no_such_setting=1")]), &["postgres://", "options=''"]),
        (
            vec![("HOME", "<files>/home"), ("PGSYSCONFDIR", "<files>/system")],
            &[
                "service=one",
                "service=one user=app password='p@ss w:r\\\\d\\'s'",
                "postgres://app@/app?service=one",
                "service=two",
                "service=three",
                "service=four",
                "service=five",
                "service=six dbname=app",
                "service=seven",
            ],
        ),
        (
            vec![("PGSERVICE", "five"), ("PGSERVICEFILE", "<files>/home/.pg_service.conf")],
            &["postgres://", "user=postgres", "service=one", "service=six"],
        ),
        (vec![("PGSERVICE", "one"), ("PGSERVICEFILE", "<files>/missing")], &["postgres://"]),
    ] {
        let environment: Vec<_> = environment.iter().map(|(name, value)| (*name, *value)).collect();
        connected += place.compare(&place.case(&environment, texts));
    }
    assert!(connected > 20, "only {connected} connected: the comparison shows little");
}
