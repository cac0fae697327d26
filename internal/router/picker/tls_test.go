package picker

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/router/picker/gatewaytest"
)

// writeCertificate writes a new certificate and its key, and returns their files.
func writeCertificate(t *testing.T, dir string) (certFile, keyFile string, der []byte) {
	t.Helper()
	certificate, err := selfSigned(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	key, err := x509.MarshalPKCS8PrivateKey(certificate.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	for file, block := range map[string]*pem.Block{
		certFile: {Type: "CERTIFICATE", Bytes: certificate.Certificate[0]}, keyFile: {Type: "PRIVATE KEY", Bytes: key},
	} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certFile, keyFile, certificate.Certificate[0]
}

// A certificate that is renewed on disk is the one that the next connection sees; h2 is agreed on.
func TestServesTheCertificateOfTheFiles(t *testing.T) {
	gatewaytest.NoLeaks(t)
	dir := t.TempDir()
	certFile, keyFile, first := writeCertificate(t, dir)
	config, err := TLSConfig(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	_, address, _ := serveWith(t, &chooser{}, config)
	seen := func() []byte {
		t.Helper()
		connection, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
		if err != nil {
			t.Fatal(err)
		}
		defer connection.Close()
		state := connection.ConnectionState()
		if state.NegotiatedProtocol != "h2" {
			t.Errorf("protocol %q is agreed on, want h2", state.NegotiatedProtocol)
		}
		return state.PeerCertificates[0].Raw
	}
	if string(seen()) != string(first) {
		t.Error("another certificate than that of the file is served")
	}
	_, _, second := writeCertificate(t, dir)
	if string(seen()) != string(second) {
		t.Error("the renewed certificate is not served")
	}
}

func TestRefusesCertificatesThatCannotBeRead(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile, _ := writeCertificate(t, dir)
	other := t.TempDir()
	_, otherKey, _ := writeCertificate(t, other)
	for name, files := range map[string][2]string{
		"no certificate": {filepath.Join(dir, "none"), keyFile}, "no key": {certFile, ""}, "another key": {certFile, otherKey},
	} {
		if _, err := TLSConfig(files[0], files[1]); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
