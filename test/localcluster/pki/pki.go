// SPDX-License-Identifier: Apache-2.0

// Package pki creates the keys and certificates of a short-lived test cluster.
//
// Invariants: the authority of the cluster signs every certificate, and a certificate is valid for one week. The
// subject identifies the holder: Kubernetes reads the common name as the user and the organizations as the groups.
// Private keys are written with mode 0600. The package is not suitable for production clusters.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// lifetime exceeds the duration of any test, but limits the risk of keys that remain in a temporary directory.
const lifetime = 7 * 24 * time.Hour

// Pair contains a certificate and its private key, both in PEM format.
type Pair struct {
	Cert, Key []byte
}

// Write stores the pair as dir/name.crt and dir/name.key.
func (p Pair) Write(dir, name string) error {
	if err := os.WriteFile(filepath.Join(dir, name+".crt"), p.Cert, 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name+".key"), p.Key, 0o600)
}

// Authority is a certificate authority.
type Authority struct {
	Pair
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority creates a self-signed certificate authority.
func NewAuthority(name string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("failed to generate the key of authority %s: %w", name, err)
	}
	template, err := newTemplate(pkix.Name{CommonName: name})
	if err != nil {
		return nil, err
	}
	template.IsCA = true
	template.BasicConstraintsValid = true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature
	pair, der, err := sign(template, template, key, key)
	if err != nil {
		return nil, fmt.Errorf("failed to sign authority %s: %w", name, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &Authority{Pair: pair, cert: cert, key: key}, nil
}

// Client issues a client certificate for the Kubernetes user and its groups.
func (a *Authority) Client(user string, groups ...string) (Pair, error) {
	return a.issue(pkix.Name{CommonName: user, Organization: groups}, nil, nil, x509.ExtKeyUsageClientAuth)
}

// Server issues a server certificate for the given addresses and DNS names.
func (a *Authority) Server(name string, addresses []net.IP, dns []string) (Pair, error) {
	return a.issue(pkix.Name{CommonName: name}, addresses, dns, x509.ExtKeyUsageServerAuth)
}

func (a *Authority) issue(subject pkix.Name, addresses []net.IP, dns []string, usage x509.ExtKeyUsage) (Pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Pair{}, fmt.Errorf("failed to generate the key of %s: %w", subject.CommonName, err)
	}
	template, err := newTemplate(subject)
	if err != nil {
		return Pair{}, err
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{usage}
	template.IPAddresses = addresses
	template.DNSNames = dns
	pair, _, err := sign(template, a.cert, key, a.key)
	if err != nil {
		return Pair{}, fmt.Errorf("failed to sign the certificate of %s: %w", subject.CommonName, err)
	}
	return pair, nil
}

func newTemplate(subject pkix.Name) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      subject,
		// NotBefore is one hour in the past because the clocks of a virtual machine and its host may differ.
		NotBefore: now.Add(-time.Hour),
		NotAfter:  now.Add(lifetime),
	}, nil
}

func sign(template, parent *x509.Certificate, key, signer *ecdsa.PrivateKey) (Pair, []byte, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		return Pair{}, nil, err
	}
	keyPEM, err := EncodeKey(key)
	if err != nil {
		return Pair{}, nil, err
	}
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return Pair{Cert: cert, Key: keyPEM}, der, nil
}

// EncodeKey returns the private key as PEM.
func EncodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

// ServiceAccountKey creates a key pair for service account tokens. Cert contains the public key (PKIX PEM, for
// --service-account-key-file), Key the private key.
func ServiceAccountKey() (Pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Pair{}, fmt.Errorf("failed to generate the service account key: %w", err)
	}
	private, err := EncodeKey(key)
	if err != nil {
		return Pair{}, err
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return Pair{}, err
	}
	return Pair{Cert: pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), Key: private}, nil
}

// WriteKubeconfig writes a kubeconfig with mode 0600 for the server (an https URL). The client's certificate and key
// are embedded.
func WriteKubeconfig(path, server string, ca []byte, client Pair) error {
	const name = "local"
	config := clientcmdapi.NewConfig()
	config.Clusters[name] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: ca}
	config.AuthInfos[name] = &clientcmdapi.AuthInfo{ClientCertificateData: client.Cert, ClientKeyData: client.Key}
	config.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name}
	config.CurrentContext = name
	return clientcmd.WriteToFile(*config, path)
}
