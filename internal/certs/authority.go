// SPDX-License-Identifier: Apache-2.0

package certs

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
)

const (
	// Lifetime is the validity of a CA certificate.
	Lifetime = 10 * 365 * 24 * time.Hour
	// certificateLifetime is the validity of a server or client certificate.
	certificateLifetime = 90 * 24 * time.Hour
	// backdated is the age of a new certificate, for clients with slow clocks.
	backdated = time.Hour
)

// Authority signs the certificates of servers or of clients.
type Authority struct {
	// certificates starts with the certificate of this CA, followed by the valid certificates of its predecessors.
	certificates []*x509.Certificate
	key          *ecdsa.PrivateKey
}

// Load reads the CA in a Secret. If the Secret does not exist, Load creates a CA with the common name subject. If
// several processes do so at the same time, all of them use the Secret that is created first.
func Load(ctx context.Context, clients kubernetes.Interface, name types.NamespacedName, subject string, now time.Time) (*Authority, error) {
	_, a, err := load(ctx, clients, name, subject, now)
	return a, err
}

// Renew loads the CA, and replaces it if less than a third of its lifetime remains. The certificate of the replaced CA
// stays in the bundle. Clients must get the new bundle before they connect to a server with a certificate of the new
// CA.
func Renew(ctx context.Context, clients kubernetes.Interface, name types.NamespacedName, subject string, now time.Time) (*Authority, error) {
	secret, a, err := load(ctx, clients, name, subject, now)
	if err != nil || now.Before(a.certificates[0].NotAfter.Add(-Lifetime/3)) {
		return a, err
	}
	next, err := newSecret(name, subject, now, a.certificates...)
	if err != nil {
		return nil, err
	}
	secret = secret.DeepCopy()
	secret.Data = next.Data
	_, err = clients.CoreV1().Secrets(name.Namespace).Update(ctx, secret, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsConflict(err) {
		return nil, fmt.Errorf("failed to renew the certificate authority: %w", err)
	}
	// After a conflict the CA that another process has written is used.
	return Load(ctx, clients, name, subject, now)
}

func load(ctx context.Context, clients kubernetes.Interface, name types.NamespacedName, subject string, now time.Time) (*corev1.Secret, *Authority, error) {
	secrets := clients.CoreV1().Secrets(name.Namespace)
	secret, err := secrets.Get(ctx, name.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		if secret, err = newSecret(name, subject, now); err != nil {
			return nil, nil, err
		}
		created, createErr := secrets.Create(ctx, secret, metav1.CreateOptions{})
		secret, err = created, createErr
		if apierrors.IsAlreadyExists(err) {
			secret, err = secrets.Get(ctx, name.Name, metav1.GetOptions{})
		}
	}
	if err != nil {
		return nil, nil, fmt.Errorf("certificate authority: %w", err)
	}
	a, err := parse(secret, now)
	if err != nil {
		return nil, nil, fmt.Errorf("certificate authority: Secret %s: %w; delete the Secret to create a new authority", name, err)
	}
	return secret, a, nil
}

// newSecret creates a CA and its Secret. The certificates of predecessors follow the certificate of the new CA.
func newSecret(name types.NamespacedName, subject string, now time.Time, predecessors ...*x509.Certificate) (*corev1.Secret, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: subject},
		NotBefore:             now.Add(-backdated),
		NotAfter:              now.Add(Lifetime),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	bundle, err := cert.EncodeCertificates(append([]*x509.Certificate{certificate}, predecessors...)...)
	if err != nil {
		return nil, err
	}
	keyPEM, err := keyutil.MarshalPrivateKeyToPEM(key)
	if err != nil {
		return nil, err
	}
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name},
		Type:       corev1.SecretTypeTLS,
		Data:       map[string][]byte{corev1.TLSCertKey: bundle, corev1.TLSPrivateKeyKey: keyPEM},
	}, nil
}

func parse(secret *corev1.Secret, now time.Time) (*Authority, error) {
	certificates, err := cert.ParseCertsPEM(secret.Data[corev1.TLSCertKey])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", corev1.TLSCertKey, err)
	}
	parsed, err := keyutil.ParsePrivateKeyPEM(secret.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", corev1.TLSPrivateKeyKey, err)
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	switch {
	case !ok:
		return nil, fmt.Errorf("%s: key of type %T is invalid: must be an ECDSA key", corev1.TLSPrivateKeyKey, parsed)
	case !certificates[0].IsCA:
		return nil, fmt.Errorf("%s: not the certificate of a certificate authority", corev1.TLSCertKey)
	case !key.PublicKey.Equal(certificates[0].PublicKey):
		return nil, fmt.Errorf("%s and %s do not belong together", corev1.TLSCertKey, corev1.TLSPrivateKeyKey)
	case now.After(certificates[0].NotAfter):
		return nil, fmt.Errorf("%s: expired on %s", corev1.TLSCertKey, certificates[0].NotAfter.Format(time.DateOnly))
	}
	certificates = slices.DeleteFunc(certificates, func(c *x509.Certificate) bool { return now.After(c.NotAfter) })
	return &Authority{certificates: certificates, key: key}, nil
}

// Bundle returns the CA certificates that clients must trust, as PEM.
func (a *Authority) Bundle() ([]byte, error) { return cert.EncodeCertificates(a.certificates...) }

// Issue creates a server certificate for DNS names and IP addresses.
func (a *Authority) Issue(hosts []string, now time.Time) (*tls.Certificate, error) {
	return a.issue(x509.ExtKeyUsageServerAuth, hosts, now)
}

// issue creates a certificate for one usage. A client certificate has no hosts.
func (a *Authority) issue(usage x509.ExtKeyUsage, hosts []string, now time.Time) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      a.certificates[0].Subject,
		NotBefore:    now.Add(-backdated),
		NotAfter:     now.Add(certificateLifetime),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{usage},
	}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificates[0], key.Public(), a.key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, nil
}

// newSerial returns a random serial number. Clients may reject two certificates of one CA with the same number.
func newSerial() (*big.Int, error) {
	return rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
}
