// SPDX-License-Identifier: Apache-2.0

// Package tlstest writes certificates for tests.
package tlstest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Authority issues certificates.
type Authority struct {
	t           testing.TB
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	// File contains the certificate of the authority as PEM.
	File string
}

// NewAuthority returns a new authority.
func NewAuthority(t testing.TB) *Authority {
	t.Helper()
	a := &Authority{t: t, File: filepath.Join(t.TempDir(), "ca.crt")}
	template := &x509.Certificate{Subject: pkix.Name{CommonName: "test authority"}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	a.certificate, a.key = a.sign(template, nil)
	a.write(a.File, "CERTIFICATE", a.certificate.Raw)
	return a
}

// Files writes a certificate for a host, or for any client, to tls.crt and tls.key of a directory.
func (a *Authority) Files(dir, host string, notAfter time.Time) (certFile, keyFile string) {
	a.t.Helper()
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: host}, NotAfter: notAfter, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if ip := net.ParseIP(host); ip != nil {
		template.IPAddresses = []net.IP{ip}
	} else {
		template.DNSNames = []string{host}
	}
	certificate, key := a.sign(template, a)
	encoded, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	a.write(certFile, "CERTIFICATE", certificate.Raw)
	a.write(keyFile, "PRIVATE KEY", encoded)
	return certFile, keyFile
}

func (a *Authority) sign(template *x509.Certificate, issuer *Authority) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120)); err != nil {
		a.t.Fatal(err)
	}
	template.NotBefore = time.Now().Add(-24 * time.Hour)
	parent, signer := template, key
	if issuer != nil {
		parent, signer = issuer.certificate, issuer.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		a.t.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return certificate, key
}

func (a *Authority) write(file, kind string, der []byte) {
	a.t.Helper()
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
}
