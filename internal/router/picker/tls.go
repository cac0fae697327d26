package picker

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"time"

	"github.com/semmoe/operator/internal/files/regularfile"
)

// TLSConfig returns the configuration for a certificate and its key in PEM files. The files are read for each
// connection, so that a renewed certificate is used without a restart. Without files, the server uses a self-signed
// certificate that it creates: gateways that do not verify certificates can still use TLS.
//
// If clientCAFile is set, gateways must present a certificate of one of its authorities.
func TLSConfig(certFile, keyFile, clientCAFile string) (*tls.Config, error) {
	config, err := serverConfig(certFile, keyFile)
	if err != nil || clientCAFile == "" {
		return config, err
	}
	withClients := func(*tls.ClientHelloInfo) (*tls.Config, error) {
		authorities, err := readAuthorities(clientCAFile)
		if err != nil {
			return nil, err
		}
		required := config.Clone()
		required.ClientAuth, required.ClientCAs, required.GetConfigForClient = tls.RequireAndVerifyClientCert, authorities, nil
		return required, nil
	}
	if _, err := withClients(nil); err != nil {
		return nil, err
	}
	config.GetConfigForClient = withClients
	return config, nil
}

// maxAuthoritiesBytes bounds the size of the CA file. It exceeds the public authorities of an operating system.
const maxAuthoritiesBytes = 1 << 20

func readAuthorities(path string) (*x509.CertPool, error) {
	text, err := regularfile.Read(path, maxAuthoritiesBytes)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s is invalid: it must contain PEM certificates of authorities, at most 1 MiB", path)
	}
	return pool, nil
}

func serverConfig(certFile, keyFile string) (*tls.Config, error) {
	if certFile == "" && keyFile == "" {
		certificate, err := selfSigned(time.Now())
		if err != nil {
			return nil, fmt.Errorf("failed to create a self-signed certificate: %w", err)
		}
		return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}, Certificates: []tls.Certificate{certificate}}, nil
	}
	read := func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		if err := errors.Join(regularfile.Check(certFile), regularfile.Check(keyFile)); err != nil {
			return nil, fmt.Errorf("failed to read the certificate: %w", err)
		}
		certificate, err := tls.LoadX509KeyPair(certFile, keyFile)
		if err != nil {
			return nil, fmt.Errorf("failed to load certificate %q with key %q: %w", certFile, keyFile, err)
		}
		return &certificate, nil
	}
	if _, err := read(nil); err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}, GetCertificate: read}, nil
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
