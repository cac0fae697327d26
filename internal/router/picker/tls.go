// SPDX-License-Identifier: Apache-2.0

package picker

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"time"

	"github.com/semmoe/operator/internal/router/tlsfiles"
)

// TLSConfig returns the configuration for a certificate and its key in PEM files, which are read for each connection
// (package tlsfiles). Without files, the server uses a self-signed certificate that it creates: gateways that do not
// verify certificates can still use TLS.
//
// If clientCAFile is set, gateways must present a certificate of one of its authorities.
func TLSConfig(certFile, keyFile, clientCAFile string) (*tls.Config, error) {
	files, err := tlsfiles.New(certFile, keyFile, clientCAFile)
	if err != nil {
		return nil, err
	}
	const protocol = "h2"
	if files.Identity != nil {
		return files.Server(protocol), nil
	}
	certificate, err := selfSigned(time.Now())
	if err != nil {
		return nil, fmt.Errorf("failed to create a self-signed certificate: %w", err)
	}
	return tlsfiles.RequireClients(&tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{protocol}, Certificates: []tls.Certificate{certificate}}, files.Authorities), nil
}

// selfSigned returns a certificate that is valid for longer than a process runs.
func selfSigned(now time.Time) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "semmoe endpoint picker"},
		NotBefore:    now.Add(-time.Hour), // tolerates clock skew
		NotAfter:     now.AddDate(10, 0, 0),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
