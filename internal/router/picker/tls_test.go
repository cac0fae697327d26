// SPDX-License-Identifier: Apache-2.0

package picker

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
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

// TestServesTheCertificateOfTheFiles checks that a certificate that is renewed on disk is used for the next connection,
// and that h2 is negotiated.
func TestServesTheCertificateOfTheFiles(t *testing.T) {
	gatewaytest.NoLeaks(t)
	dir := t.TempDir()
	certFile, keyFile, first := writeCertificate(t, dir)
	config, err := TLSConfig(certFile, keyFile, "")
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
		if _, err := TLSConfig(files[0], files[1], ""); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// clientCertificate returns a self-signed client certificate and the file with its authority.
func clientCertificate(t *testing.T) (certificate tls.Certificate, file string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, file
}

// TestClientCertificates checks that with a CA file, a gateway without a certificate of one of its authorities is
// rejected. The file is read for each connection.
func TestClientCertificates(t *testing.T) {
	gatewaytest.NoLeaks(t)
	if _, err := TLSConfig("", "", "tls_test.go"); err == nil || !strings.Contains(err.Error(), "PEM certificates") {
		t.Errorf("a file without certificates: %v", err)
	}
	known, file := clientCertificate(t)
	stranger, otherFile := clientCertificate(t)
	config, err := TLSConfig("", "", file)
	if err != nil {
		t.Fatal(err)
	}
	_, address, _ := serveWith(t, &chooser{}, config)
	accepted := func(certificates ...tls.Certificate) bool {
		t.Helper()
		connection, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}, Certificates: certificates})
		if err == nil {
			// A TLS 1.3 server rejects a client after the client's handshake; an HTTP/2 server sends its settings.
			_, err = connection.Read(make([]byte, 1))
			connection.Close()
		}
		return err == nil
	}
	if accepted() || accepted(stranger) || !accepted(known) {
		t.Errorf("accepted: without a certificate %v, with that of a stranger %v, with a known one %v", accepted(), accepted(stranger), accepted(known))
	}
	text, err := os.ReadFile(otherFile)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if !accepted(stranger) || accepted(known) {
		t.Error("a changed file of authorities has no effect")
	}
}
