package store

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
	"sync"
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
	authorityLifetime   = 10 * 365 * 24 * time.Hour
	certificateLifetime = 90 * 24 * time.Hour
	// backdated covers clocks of clients that are behind.
	backdated = time.Hour
	// caKey is where the ConfigMap holds the certificate for clients.
	caKey = "ca.crt"
)

// authority is the store's own certificate authority. Its key lies in a Secret, so that it outlives the pod and is shared
// by several; its certificate alone in a ConfigMap of the same name, for clients.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

// loadAuthority reads the authority, or makes it where there is none yet, and publishes its certificate. Of several
// stores that start together, the one whose Secret is created first wins.
func loadAuthority(ctx context.Context, clients kubernetes.Interface, name types.NamespacedName) (*authority, error) {
	secrets := clients.CoreV1().Secrets(name.Namespace)
	secret, err := secrets.Get(ctx, name.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		if secret, err = newAuthority(name, time.Now()); err != nil {
			return nil, err
		}
		created, createErr := secrets.Create(ctx, secret, metav1.CreateOptions{})
		secret, err = created, createErr
		if apierrors.IsAlreadyExists(err) {
			secret, err = secrets.Get(ctx, name.Name, metav1.GetOptions{})
		}
	}
	if err != nil {
		return nil, fmt.Errorf("certificate authority: %w", err)
	}
	a, err := parseAuthority(secret)
	if err != nil {
		return nil, fmt.Errorf("certificate authority: Secret %s: %w; delete it for a new one", name, err)
	}
	return a, publish(ctx, clients, name, string(secret.Data[corev1.TLSCertKey]))
}

func newAuthority(name types.NamespacedName, now time.Time) (*corev1.Secret, error) {
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
		Subject:               pkix.Name{CommonName: "semmoe artifact store"},
		NotBefore:             now.Add(-backdated),
		NotAfter:              now.Add(authorityLifetime),
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
	certificatePEM, err := cert.EncodeCertificates(certificate)
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
		Data:       map[string][]byte{corev1.TLSCertKey: certificatePEM, corev1.TLSPrivateKeyKey: keyPEM},
	}, nil
}

func parseAuthority(secret *corev1.Secret) (*authority, error) {
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
		return nil, fmt.Errorf("%s: is a %T, must be an ECDSA key", corev1.TLSPrivateKeyKey, parsed)
	case !certificates[0].IsCA:
		return nil, fmt.Errorf("%s: is not a certificate authority's", corev1.TLSCertKey)
	case !key.PublicKey.Equal(certificates[0].PublicKey):
		return nil, fmt.Errorf("%s and %s do not belong together", corev1.TLSCertKey, corev1.TLSPrivateKeyKey)
	case time.Now().After(certificates[0].NotAfter):
		return nil, fmt.Errorf("%s: expired on %s", corev1.TLSCertKey, certificates[0].NotAfter.Format(time.DateOnly))
	}
	return &authority{certificate: certificates[0], key: key}, nil
}

// publish gives the certificate to clients.
func publish(ctx context.Context, clients kubernetes.Interface, name types.NamespacedName, certificate string) error {
	maps := clients.CoreV1().ConfigMaps(name.Namespace)
	intent := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name},
		Data:       map[string]string{caKey: certificate},
	}
	_, err := maps.Create(ctx, intent, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		_, err = maps.Update(ctx, intent, metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("publish the certificate authority in ConfigMap %s: %w", name, err)
	}
	return nil
}

// issuer hands out a certificate for the store's names, and makes a new one well before it expires.
type issuer struct {
	authority *authority
	hosts     []string

	mu      sync.Mutex
	current *tls.Certificate
}

func (i *issuer) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	now := time.Now()
	if i.current == nil || now.After(i.current.Leaf.NotAfter.Add(-certificateLifetime/3)) {
		issued, err := i.authority.issue(i.hosts, now)
		if err != nil {
			return nil, err
		}
		i.current = issued
	}
	return i.current, nil
}

// issue makes a server certificate for names and addresses.
func (a *authority) issue(hosts []string, now time.Time) (*tls.Certificate, error) {
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
		Subject:      pkix.Name{CommonName: "semmoe artifact store"},
		NotBefore:    now.Add(-backdated),
		NotAfter:     now.Add(certificateLifetime),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, nil
}

// newSerial: clients may refuse two certificates of one authority with the same number.
func newSerial() (*big.Int, error) {
	return rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
}
