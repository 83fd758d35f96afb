//! Encrypted connections to a real server, by libpq's modes.

use std::fs;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer,
    KeyIdMethod, KeyPair, RevokedCertParams, date_time_ymd,
};
use tenure::{Client, ErrorKind};

use crate::server::Server;
use crate::support::with_schema;

/// A certificate authority.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub(crate) certificate: String,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), certificate }
    }

    /// A certificate for a host or a role, and its key.
    pub(crate) fn sign(&self, name: &str) -> (String, String) {
        self.sign_numbered(name, getrandom::u64().unwrap() >> 1)
    }

    /// A certificate with this serial number, and its key.
    pub(crate) fn sign_numbered(&self, name: &str, serial: u64) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.serial_number = Some(serial.into());
        params.distinguished_name.push(DnType::CommonName, name);
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }

    /// A list that revokes the certificates with these serial numbers.
    pub(crate) fn revocations(&self, serials: &[u64]) -> String {
        let revoked = |serial: &u64| RevokedCertParams {
            serial_number: (*serial).into(),
            revocation_time: date_time_ymd(2020, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2020, 1, 1),
            next_update: date_time_ymd(4000, 1, 1),
            crl_number: 1.into(),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&self.issuer).unwrap().pem().unwrap()
    }
}

#[test]
fn a_server_is_verified_as_far_as_sslmode_asks() {
    let Some(mut server) = Server::start() else { return };
    let (ours, other) = (Authority::new(), Authority::new());
    let (certificate, key) = ours.sign("localhost");
    server.down();
    server.write("server.crt", &certificate);
    server.write("server.key", &key);
    server.write("clients.crt", &ours.certificate);
    server.write("postgresql.auto.conf", "ssl = on\nssl_ca_file = 'clients.crt'\n");
    server.write(
        "pg_hba.conf",
        "hostssl all certified 127.0.0.1/32 cert\nhostnossl all encrypted 127.0.0.1/32 reject\n\
         host all all 127.0.0.1/32 trust\n",
    );
    server.up();
    let file = |name: &str, text: &str| {
        let path = server.folder().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (root, stranger) = (file("root.crt", &ours.certificate), file("x.crt", &other.certificate));
    let (certificate, key) = ours.sign("certified");
    let pair = format!("&sslcert={}&sslkey={}", file("c.crt", &certificate), file("c.key", &key));
    with_schema(&server.url(), async move |schema| {
        let db = schema.connect().await;
        db.batch_execute(
            "CREATE ROLE encrypted SUPERUSER LOGIN; CREATE ROLE certified SUPERUSER LOGIN",
        )
        .await
        .unwrap();
        let ok = None;
        let denied = Some(ErrorKind::Denied);
        for (who, host, options, refused) in [
            ("encrypted", "127.0.0.1", "sslmode=disable".to_owned(), denied),
            ("encrypted", "127.0.0.1", "sslmode=prefer".to_owned(), ok),
            ("encrypted", "127.0.0.1", "sslmode=require".to_owned(), ok),
            ("encrypted", "127.0.0.1", format!("sslmode=require&sslrootcert={stranger}"), denied),
            ("encrypted", "127.0.0.1", format!("sslmode=verify-ca&sslrootcert={root}"), ok),
            ("encrypted", "127.0.0.1", format!("sslmode=verify-ca&sslrootcert={stranger}"), denied),
            ("encrypted", "127.0.0.1", format!("sslmode=verify-full&sslrootcert={root}"), denied),
            ("encrypted", "localhost", format!("sslmode=verify-full&sslrootcert={root}"), ok),
            ("encrypted", "localhost", "sslmode=verify-full".to_owned(), denied),
            ("certified", "127.0.0.1", "sslmode=require".to_owned(), denied),
            ("certified", "127.0.0.1", format!("sslmode=require{pair}"), ok),
        ] {
            let port = server.port;
            let url = schema.url_at(&format!("postgres://{who}@{host}:{port}/postgres?{options}"));
            let client = Client::connect(&url).await.unwrap();
            let outcome = client.lock("key").try_acquire().await;
            let error = outcome.as_ref().err();
            assert_eq!(error.map(tenure::Error::kind), refused, "{who} {options}: {error:?}");
            if let Ok(guard) = outcome {
                guard.release().await.unwrap();
            }
            let place = format!("{host}:{port}/postgres");
            let url = format!("postgres+advisory://{who}@{place}?{options}");
            let client = Client::connect(&url).await.unwrap();
            match client.lock("key").try_acquire().await {
                Ok(guard) => {
                    assert_eq!(refused, None, "{who} {options}");
                    guard.release().await.unwrap();
                }
                Err(error) => {
                    assert_eq!(Some(error.kind()), refused, "{who} {options}: {error:?}");
                    assert!(error.to_string().contains(&place), "{error}");
                }
            }
        }
        drop(server);
    });
}
